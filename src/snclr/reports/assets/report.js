"use strict";
(function () {
  function readData(id) { return JSON.parse(document.getElementById(id).textContent); }
  function format(value, share) { return share ? (value * 100).toFixed(1) + "%" : String(Number(value.toPrecision(4))); }

  // Call `show` for a pointer that moves over or taps an element, and `hide` when it leaves or taps elsewhere.
  function follow(element, show, hide) {
    element.addEventListener("pointermove", show);
    element.addEventListener("pointerdown", show);  // a tap moves no pointer
    element.addEventListener("pointerleave", function (event) { if (event.pointerType === "mouse") hide(); });
    document.addEventListener("pointerdown", function (event) { if (!element.contains(event.target)) hide(); });
  }

  // Charts: show epoch and value of the point of each line nearest to the pointer.
  var curves = readData("curves-data"), runs = Array.from(document.querySelectorAll(".runs bdi"));
  document.querySelectorAll(".chart").forEach(function (chart) {
    var data = curves[chart.dataset.metric], svg = chart.querySelector("svg");
    var cursor = svg.querySelector(".cursor"), line = cursor.querySelector("line"), dot = cursor.querySelector("circle");
    var output = chart.querySelector("output"), caption = chart.querySelector("small");
    var lastValue = output.textContent, description = caption.textContent;
    follow(svg, function (event) {
      var area = svg.getBoundingClientRect(), found = null, texts = [];
      var pointer = (event.clientX - area.left) / area.width * svg.viewBox.baseVal.width;
      data.lines.forEach(function (points) {
        var best = -1, distance = Infinity;
        points.x.forEach(function (x, i) {
          var d = Math.abs(x - pointer);
          if (points.y[i] !== null && d < distance) { distance = d; best = i; }
        });
        if (best < 0) return;
        texts.push((runs.length ? runs[points.run].textContent + " " : "") + format(points.value[best], data.share));
        if (!found || distance < found.distance) found = { points: points, best: best, distance: distance };
      });
      if (!found) return;
      var points = found.points, best = found.best, x = points.x[best];
      line.setAttribute("x1", x); line.setAttribute("x2", x);
      dot.setAttribute("cx", x); dot.setAttribute("cy", points.y[best]);
      cursor.setAttribute("visibility", "visible");
      var epoch = "epoch " + format(points.epoch[best]);
      output.textContent = runs.length ? epoch : texts[0];
      caption.textContent = runs.length ? texts.join(", ")
        : "step " + points.step[best].toLocaleString("en") + ", " + epoch;
    }, function () {
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
  follow(svg, function (event) {
    var area = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / area.width;
    var best = -1, distance = (event.pointerType === "mouse" ? 18 : 30) * scale;  // a finger is less precise
    var x = (event.clientX - area.left) * scale, y = (event.clientY - area.top) * scale;
    centers.forEach(function (center, i) {
      var d = Math.hypot(center[0] - x, center[1] - y);
      if (d < distance && !dots[i].classList.contains("dim")) { distance = d; best = i; }
    });
    deselect();
    if (best < 0) return;
    selected = best; dots[best].classList.add("near");
    text.textContent = data.names[best];
    if (data.classes[best] !== null) {
      var label = document.createElement("b"); label.textContent = data.classes[best];
      text.prepend(label, document.createElement("br"));
    }
    thumbnail.style.backgroundPosition =
      -(best % data.columns) * side + "px " + -Math.floor(best / data.columns) * side + "px";
    tip.hidden = false;
    var px = centers[best][0] / scale, py = centers[best][1] / scale;
    tip.style.left = Math.max(4, px + tip.offsetWidth + 18 > area.width ? px - tip.offsetWidth - 14 : px + 14) + "px";
    tip.style.top = Math.max(4, Math.min(py - 20, area.height - tip.offsetHeight - 6)) + "px";
  }, deselect);

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
