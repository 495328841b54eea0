"use strict";
// Hover values. A chart's JSON holds the pixel positions and texts of its points; charts over steps share the cursor.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const charts = [...document.querySelectorAll("figure.chart")].map((figure) => ({
    figure,
    svg: figure.querySelector("svg"),
    cursor: figure.querySelector(".cursor"),
    data: JSON.parse(figure.querySelector("script").textContent),
    tip: null,
  }));

  function make(name, attributes) {
    const element = document.createElementNS(SVG, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    return element;
  }

  function nearest(positions, x) {
    let best = 0;
    positions.forEach((at, index) => {
      if (Math.abs(at - x) < Math.abs(positions[best] - x)) best = index;
    });
    return best;
  }

  function point(chart, index) {
    const { height } = chart.svg.viewBox.baseVal;
    const x = chart.data.x[index];
    chart.cursor.replaceChildren(make("line", { x1: x, x2: x, y1: 12, y2: height - 30 }));
    for (const line of chart.data.lines) {
      if (line.y[index] === null) continue;
      chart.cursor.append(make("circle", { class: "tone" + line.tone, cx: x, cy: line.y[index], r: 4.5 }));
    }
  }

  function row(label, value, tone) {
    const element = document.createElement("div");
    const name = document.createElement("span");
    const text = document.createElement("b");
    name.textContent = label;
    text.textContent = value;
    if (tone) name.className = "key tone" + tone;
    element.append(name, text);
    return element;
  }

  function tip(chart, index) {
    chart.tip ??= chart.figure.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));
    chart.tip.replaceChildren(row(chart.data.name[index], ""));
    for (const line of chart.data.lines) chart.tip.append(row(line.label, line.text[index], line.tone));
    const scale = chart.svg.clientWidth / chart.svg.viewBox.baseVal.width;
    const x = chart.svg.offsetLeft + chart.data.x[index] * scale;
    const left = x + 14 + chart.tip.offsetWidth > chart.figure.clientWidth ? x - 14 - chart.tip.offsetWidth : x + 14;
    const frame = chart.figure.getBoundingClientRect();
    chart.tip.style.left = Math.max(4, left) + "px";
    chart.tip.style.top = chart.svg.getBoundingClientRect().top - frame.top + 8 + "px";
  }

  function show(chart, index) {
    chart.index = index;
    tip(chart, index);
    const name = chart.data.name[index];
    for (const other of charts) {
      const same = other === chart ? index : other.data.name.indexOf(name);
      if (same >= 0) point(other, same);
      else other.cursor.replaceChildren();
    }
  }

  function hide(chart) {
    chart.tip?.remove();
    chart.tip = null;
    for (const other of charts) other.cursor.replaceChildren();
  }

  for (const chart of charts) {
    const { svg, data } = chart;
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      show(chart, nearest(data.x, ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width));
    });
    svg.addEventListener("pointerleave", () => hide(chart));
    svg.addEventListener("blur", () => hide(chart));
    svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const last = data.x.length - 1;
      show(chart, Math.min(Math.max((chart.index ?? (by > 0 ? -1 : last + 1)) + by, 0), last));
    });
  }

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const now = root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.style.colorScheme = now === "dark" ? "light" : "dark";
  });
})();
