"use strict";
(function () {
  function readData(id) { return JSON.parse(document.getElementById(id).textContent); }
  function format(value, share) { return share ? (value * 100).toFixed(1) + "%" : String(Number(value.toPrecision(4))); }

  // Charts: show step, epoch and value of the point nearest to the pointer.
  var curves = readData("curves-data");
  document.querySelectorAll(".chart").forEach(function (chart) {
    var points = curves[chart.dataset.metric], svg = chart.querySelector("svg");
    var cursor = svg.querySelector(".cursor"), line = cursor.querySelector("line"), dot = cursor.querySelector("circle");
    var output = chart.querySelector("output"), caption = chart.querySelector("small");
    var lastValue = output.textContent, description = caption.textContent;
    svg.addEventListener("pointermove", function (event) {
      var area = svg.getBoundingClientRect(), best = -1, distance = Infinity;
      var pointer = (event.clientX - area.left) / area.width * svg.viewBox.baseVal.width;
      points.x.forEach(function (x, i) {
        var d = Math.abs(x - pointer);
        if (points.y[i] !== null && d < distance) { distance = d; best = i; }
      });
      if (best < 0) return;
      var x = points.x[best];
      line.setAttribute("x1", x); line.setAttribute("x2", x);
      dot.setAttribute("cx", x); dot.setAttribute("cy", points.y[best]);
      cursor.setAttribute("visibility", "visible");
      output.textContent = format(points.value[best], points.share);
      caption.textContent = "step " + points.step[best].toLocaleString("en") + ", epoch " + format(points.epoch[best]);
    });
    svg.addEventListener("pointerleave", function () {
      cursor.setAttribute("visibility", "hidden"); output.textContent = lastValue; caption.textContent = description;
    });
  });

  // Map: show name, class and thumbnail of the image nearest to the pointer.
  var map = document.querySelector(".map"), data = readData("map-data");
  if (!map || !data) return;
  var svg = map.querySelector("svg"), dots = Array.from(svg.querySelectorAll("circle"));
  var tip = map.querySelector(".tip"), thumbnail = tip.querySelector(".thumbnail"), text = tip.querySelector("p");
  var centers = dots.map(function (d) { return [+d.getAttribute("cx"), +d.getAttribute("cy")]; });
  svg.querySelectorAll("title").forEach(function (t) { t.remove(); });  // the tip replaces the native tooltip
  var side = 64, selected = -1;
  if (data.sprite) {
    thumbnail.style.backgroundImage = "url(" + data.sprite + ")";
    thumbnail.style.backgroundSize = data.columns * side + "px auto";
  } else { thumbnail.remove(); }
  function deselect() { if (selected >= 0) dots[selected].classList.remove("near"); selected = -1; tip.hidden = true; }
  svg.addEventListener("pointermove", function (event) {
    var area = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / area.width, best = -1, distance = 18 * scale;
    var x = (event.clientX - area.left) * scale, y = (event.clientY - area.top) * scale;
    centers.forEach(function (center, i) {
      var d = Math.hypot(center[0] - x, center[1] - y);
      if (d < distance && !dots[i].classList.contains("dim")) { distance = d; best = i; }
    });
    deselect();
    if (best < 0) return;
    selected = best; dots[best].classList.add("near");
    text.textContent = data.names[best];
    if (data.classes && data.classes[best] !== null) {
      var label = document.createElement("b"); label.textContent = data.classes[best];
      text.prepend(label, document.createElement("br"));
    }
    thumbnail.style.backgroundPosition =
      -(best % data.columns) * side + "px " + -Math.floor(best / data.columns) * side + "px";
    tip.hidden = false;
    var px = centers[best][0] / scale, py = centers[best][1] / scale;
    tip.style.left = Math.max(4, px + tip.offsetWidth + 18 > area.width ? px - tip.offsetWidth - 14 : px + 14) + "px";
    tip.style.top = Math.max(4, Math.min(py - 20, area.height - tip.offsetHeight - 6)) + "px";
  });
  svg.addEventListener("pointerleave", deselect);

  // Legend: highlight one class.
  var buttons = Array.from(document.querySelectorAll(".legend button"));
  buttons.forEach(function (button) {
    button.addEventListener("click", function () {
      var on = button.getAttribute("aria-pressed") !== "true";
      buttons.forEach(function (b) { b.setAttribute("aria-pressed", "false"); });
      button.setAttribute("aria-pressed", String(on));
      dots.forEach(function (d) { d.classList.toggle("dim", on && !d.classList.contains(button.dataset.color)); });
    });
  });
})();
