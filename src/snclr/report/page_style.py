"""The look of the page and its small script. Both are constants: nothing of a run is ever written into them."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--paper:#f6f6f3;--card:#fff;--ink:#1b2129;--faint:#59626e;--line:#e2e4e8;--grid:#eceef1;
--accent:#2b66c4;--soft:#a9c4ee;--same:#1f8f50;--other:#cf3f38;--warn:#8a4b00;--warnpaper:#fff3dc;--shade:#f0f1f3;
--c0:#3b7dd8;--c1:#e8833a;--c2:#2fa35b;--c3:#d94f4f;--c4:#8d63c9;--c5:#9a6b4b;--c6:#dd72b4;--c7:#1fa3a3;--c8:#a3a32a;
--c9:#58b4e8;--c10:#d9ae1f;--c11:#7cb82f;--cn:#98a1ab}
@media (prefers-color-scheme:dark){:root{--paper:#111419;--card:#191e25;--ink:#e7eaee;--faint:#9da7b3;--line:#2a313a;
--grid:#242a32;--accent:#7db0ff;--soft:#3c5a88;--same:#43c07c;--other:#ff736b;--warn:#ffc76b;--warnpaper:#33270f;
--shade:#222830}}
*{box-sizing:border-box}
html{scroll-behavior:smooth;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,"Noto Sans",sans-serif}
main,header,footer{max-width:1140px;margin:0 auto;padding:0 20px}
header{padding-top:44px}
body,.how,.key{overflow-wrap:anywhere}
thead,tbody{overflow-wrap:break-word}
tbody th bdi,.numbers bdi{display:inline-block;max-width:14em;overflow-wrap:break-word}
h1{font-size:clamp(1.7rem,5vw,2.5rem);line-height:1.15;margin:0;letter-spacing:-.02em;font-weight:700}
h2{font-size:1.3rem;margin:0 0 2px;letter-spacing:-.01em}
.kicker{font-size:.8rem;letter-spacing:.08em;text-transform:uppercase;color:var(--faint);margin:0 0 6px}
.lead{color:var(--faint);margin:10px 0 22px;max-width:75ch}
.lead b{color:var(--ink);font-weight:600}
.hint{color:var(--faint);margin:0 0 18px;max-width:80ch}
small{color:var(--faint);font-size:.82em}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(240px,1fr));gap:12px;margin:0}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 16px}
.tiles dt,.tiles small{display:block;font-size:.82rem;color:var(--faint);font-weight:400;letter-spacing:0}
.tiles dd{margin:0;font-size:1.5rem;font-weight:650;letter-spacing:-.01em;font-variant-numeric:tabular-nums;
line-height:1.3}
.alerts{list-style:none;margin:16px 0 0;padding:0}
.alerts li{background:var(--warnpaper);color:var(--warn);border-radius:10px;padding:10px 16px;margin-bottom:8px}
nav{margin:24px 0 0;border-bottom:1px solid var(--line);padding-bottom:10px;display:flex;flex-wrap:wrap;gap:4px 18px}
a{color:var(--accent);text-decoration:none}
a:hover,a:focus-visible{text-decoration:underline}
section{background:var(--card);border:1px solid var(--line);border-radius:16px;padding:24px;margin:22px 0}
.missing{color:var(--faint);background:var(--shade);border-radius:10px;padding:12px 16px;margin:14px 0 0}
.protocol{color:var(--faint);font-size:.86rem;margin:16px 0 0;max-width:105ch}
figure{margin:0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));gap:26px 28px}
.chart figcaption{display:grid;grid-template-columns:1fr auto;gap:0 10px;align-items:baseline;margin-bottom:6px}
.chart output{font-variant-numeric:tabular-nums;font-weight:600;color:var(--accent)}
.chart small{grid-column:1/-1;line-height:1.35}
.chart svg{display:block;width:100%;height:auto;overflow:visible;touch-action:pan-y}
.chart text{font-size:11px;fill:var(--faint);font-variant-numeric:tabular-nums}
.chart .y{text-anchor:end}.chart .x{text-anchor:middle}
.chart path{fill:none;stroke:var(--accent);stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.chart .faint{stroke:var(--soft);stroke-width:1}
.chart .mean{stroke-width:2.2}
.grid{stroke:var(--grid);stroke-width:1}
.cursor line{stroke:var(--faint);stroke-width:1;stroke-dasharray:2 3}
.cursor circle{fill:var(--card);stroke:var(--accent);stroke-width:2}
details{margin-top:22px}
summary{cursor:pointer;color:var(--accent);font-weight:550}
details>*:not(summary){margin-top:16px}
.gallery,.gallery ol,.legend{list-style:none;margin:0;padding:0}
.gallery>li{display:grid;grid-template-columns:150px 1fr;gap:36px;padding:16px 0;border-top:1px solid var(--line)}
.gallery>li:first-child{border-top:0}
.gallery ol{display:grid;grid-template-columns:repeat(auto-fill,minmax(110px,150px));gap:14px 20px}
.card img,.gone{display:block;width:100%;height:auto;aspect-ratio:1;border-radius:10px;image-rendering:auto;
background:var(--shade)}
.card img{image-rendering:pixelated}
.card img[src^="data:image/jpeg"]{image-rendering:auto}
.gone{display:grid;place-items:center;text-align:center;font-size:.8rem;color:var(--faint)}
.card.same img,.card.same .gone{box-shadow:0 0 0 3px var(--card),0 0 0 5px var(--same)}
.card.other img,.card.other .gone{box-shadow:0 0 0 3px var(--card),0 0 0 5px var(--other)}
.card figcaption{font-size:.88rem;line-height:1.35;margin-top:9px;display:flex;flex-wrap:wrap;gap:0 8px}
.card .w{font-weight:600;font-variant-numeric:tabular-nums}
.query .label{font-weight:600}
.other .label{color:var(--other);flex-basis:100%}
.other .label::before{content:"\\2260\\2009"}
.key-edges{display:flex;flex-wrap:wrap;gap:4px 20px;font-size:.86rem;color:var(--faint);margin:0 0 6px;padding:0}
.key-edges span::before{content:"";display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px;
border:2px solid var(--same)}
.key-edges .other::before{border-color:var(--other)}
table{border-collapse:collapse;width:100%;font-size:.92rem}
caption{text-align:left;color:var(--faint);font-size:.86rem;padding-bottom:6px}
th,td{text-align:left;padding:9px 14px 9px 0;border-top:1px solid var(--line);vertical-align:top}
thead th{border-top:0;font-size:.8rem;color:var(--faint);font-weight:550}
tbody th{font-weight:600}
.number{font-variant-numeric:tabular-nums;white-space:nowrap}
.numbers span{display:block;font-weight:600;font-variant-numeric:tabular-nums}
.numbers small{font-weight:400;display:inline-block;min-width:3.4em}
.how{color:var(--faint);min-width:16em}.how small{display:block}
.when{white-space:nowrap;color:var(--faint);font-variant-numeric:tabular-nums}
.results .numbers{min-width:12em}
.wide{overflow-x:auto}
.key{min-width:14em}
.lines td,.lines th{white-space:nowrap}
.shares{max-width:430px;margin-bottom:18px}
.shares th,.shares td{border:0;padding:2px 14px 2px 0;vertical-align:middle}
.shares thead th{padding-bottom:4px}
.shares td:nth-child(2){width:75%}
.bar{display:block;width:100%;height:8px;border-radius:4px}
.track{fill:var(--shade)}.fill{fill:var(--same)}
.unseen{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.settings{columns:3 280px;column-gap:34px;margin:0;font-size:.9rem}
.settings div{display:flex;justify-content:space-between;gap:14px;padding:5px 0;border-bottom:1px solid var(--grid);
break-inside:avoid}
.settings dt{color:var(--faint)}
.settings dt,.settings dd{min-width:0}
.settings dd{margin:0;text-align:right;font-variant-numeric:tabular-nums}
.map{position:relative;border:1px solid var(--line);border-radius:12px;background:var(--paper);overflow:hidden}
.map>svg{display:block;width:100%;height:auto}
.map circle{opacity:.78;stroke:var(--paper);stroke-width:.7}
.map circle.dim{opacity:.07}
.map circle.near{opacity:1;stroke:var(--ink);stroke-width:2}
.tip{position:absolute;pointer-events:none;background:var(--card);border:1px solid var(--line);border-radius:10px;
box-shadow:0 6px 24px rgb(0 0 0/.18);padding:8px 12px;display:flex;gap:10px;align-items:center;width:max-content;
max-width:min(300px,70%);font-size:.84rem;line-height:1.35}
.tip[hidden]{display:none}.tip p{margin:0;overflow-wrap:anywhere}
.shot{flex:none;width:64px;height:64px;border-radius:6px;background-repeat:no-repeat;image-rendering:auto}
.legend{display:flex;flex-wrap:wrap;gap:4px 6px;margin-top:14px}
.legend button{font:inherit;font-size:.88rem;color:inherit;background:none;border:1px solid transparent;
border-radius:8px;padding:3px 9px;max-width:100%;text-align:left;cursor:pointer;display:flex;gap:7px;align-items:center}
.legend button:hover,.legend button:focus-visible{border-color:var(--line);background:var(--shade)}
.legend button[aria-pressed=true]{border-color:var(--ink)}
.legend svg{width:11px;height:11px;flex:none}
.c0{fill:var(--c0)}.c1{fill:var(--c1)}.c2{fill:var(--c2)}.c3{fill:var(--c3)}.c4{fill:var(--c4)}.c5{fill:var(--c5)}
.c6{fill:var(--c6)}.c7{fill:var(--c7)}.c8{fill:var(--c8)}.c9{fill:var(--c9)}.c10{fill:var(--c10)}.c11{fill:var(--c11)}
.cn{fill:var(--cn)}
footer{color:var(--faint);font-size:.86rem;padding-top:6px;padding-bottom:44px}
@media (max-width:640px){
main,header,footer{padding-left:12px;padding-right:12px}header{padding-top:26px}
section{padding:18px 14px;border-radius:14px;margin:14px 0}
.tiles{grid-template-columns:repeat(2,1fr)}
.gallery>li{grid-template-columns:1fr;gap:14px}.query{max-width:128px}
.gallery ol{grid-template-columns:repeat(3,1fr)}
.results thead{display:none}.results tr{display:block;border-top:1px solid var(--line);padding:10px 0}
.results th,.results td{display:block;border:0;padding:1px 0}.how,.results .numbers{min-width:0}
.numbers span{display:inline-block;margin-right:14px}
.map circle{stroke-width:1}}
@media print{section{break-inside:avoid}nav{display:none}body{background:#fff}}
"""

SCRIPT = """
"use strict";
(function () {
  function data(id) { var e = document.getElementById(id); return e ? JSON.parse(e.textContent) : null; }
  function words(v, share) { return share ? (v * 100).toFixed(1) + "%" : String(Number(v.toPrecision(4))); }
  var LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 24, WIDTH = 340, HEIGHT = 190;
  var curves = data("curves-data") || {};
  document.querySelectorAll(".chart").forEach(function (chart) {
    var points = curves[chart.dataset.metric], svg = chart.querySelector("svg"), box = svg.dataset;
    if (!points) return;
    var cursor = svg.querySelector(".cursor");
    var line = cursor.querySelector("line"), dot = cursor.querySelector("circle");
    var out = chart.querySelector("output"), note = chart.querySelector("small");
    var told = out.textContent, noted = note.textContent;
    function leave() { cursor.setAttribute("visibility", "hidden"); out.textContent = told; note.textContent = noted; }
    svg.addEventListener("pointermove", function (event) {
      var area = svg.getBoundingClientRect(), best = -1, gap = Infinity;
      var at = ((event.clientX - area.left) / area.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
      var epoch = +box.x0 + at * (box.x1 - box.x0);
      points.epoch.forEach(function (x, i) {
        var d = Math.abs(x - epoch);
        if (points.value[i] !== null && d < gap) { gap = d; best = i; }
      });
      if (best < 0) return;
      var x = LEFT + (points.epoch[best] - box.x0) / (box.x1 - box.x0) * (WIDTH - LEFT - RIGHT);
      var y = HEIGHT - BOTTOM - (points.value[best] - box.y0) / (box.y1 - box.y0) * (HEIGHT - TOP - BOTTOM);
      line.setAttribute("x1", x); line.setAttribute("x2", x);
      dot.setAttribute("cx", x); dot.setAttribute("cy", y);
      cursor.setAttribute("visibility", "visible");
      out.textContent = words(points.value[best], points.share);
      note.textContent = "step " + points.step[best].toLocaleString("en") + ", epoch " + words(points.epoch[best]);
    });
    svg.addEventListener("pointerleave", leave);
  });
  var map = document.querySelector(".map"), facts = data("map-data");
  if (!map || !facts) return;
  var svg = map.querySelector("svg"), dots = Array.from(svg.querySelectorAll("circle"));
  var tip = map.querySelector(".tip"), shot = tip.querySelector(".shot"), text = tip.querySelector("p");
  var places = dots.map(function (d) { return [+d.getAttribute("cx"), +d.getAttribute("cy")]; });
  svg.querySelectorAll("title").forEach(function (t) { t.remove(); });
  var side = 64, near = -1;
  if (facts.sheet) {
    shot.style.backgroundImage = "url(" + facts.sheet + ")";
    shot.style.backgroundSize = facts.columns * side + "px auto";
  } else { shot.remove(); }
  function forget() { if (near >= 0) dots[near].classList.remove("near"); near = -1; tip.hidden = true; }
  svg.addEventListener("pointermove", function (event) {
    var area = svg.getBoundingClientRect(), scale = 1000 / area.width, best = -1, gap = 18 * scale;
    var x = (event.clientX - area.left) * scale, y = (event.clientY - area.top) * scale;
    places.forEach(function (p, i) {
      var d = Math.hypot(p[0] - x, p[1] - y);
      if (d < gap && !dots[i].classList.contains("dim")) { gap = d; best = i; }
    });
    forget();
    if (best < 0) return;
    near = best; dots[best].classList.add("near");
    text.textContent = facts.names[best];
    if (facts.classes && facts.classes[best] !== null) {
      var b = document.createElement("b"); b.textContent = facts.classes[best];
      text.prepend(b, document.createElement("br"));
    }
    var column = best % facts.columns, row = Math.floor(best / facts.columns);
    shot.style.backgroundPosition = -column * side + "px " + -row * side + "px";
    tip.hidden = false;
    var px = places[best][0] / scale, py = places[best][1] / scale;
    tip.style.left = Math.max(4, px + tip.offsetWidth + 18 > area.width ? px - tip.offsetWidth - 14 : px + 14) + "px";
    tip.style.top = Math.max(4, Math.min(py - 20, area.height - tip.offsetHeight - 6)) + "px";
  });
  svg.addEventListener("pointerleave", forget);
  var buttons = Array.from(document.querySelectorAll(".legend button"));
  buttons.forEach(function (button) {
    button.addEventListener("click", function () {
      var on = button.getAttribute("aria-pressed") !== "true";
      buttons.forEach(function (b) { b.setAttribute("aria-pressed", "false"); });
      button.setAttribute("aria-pressed", String(on));
      dots.forEach(function (d) { d.classList.toggle("dim", on && !d.classList.contains(button.dataset.colour)); });
    });
  });
})();
"""
