"use strict";
(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const figures = all("[data-figure]");
  const linked = figures.filter((div) => "linked" in div.dataset);
  const config = {
    responsive: true,
    displaylogo: false,
    // Named one by one: among plotly's own is a button that hands the figure to a server.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    plotlyServerURL: "",
  };

  function colours(layout) {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    const none = "rgba(0,0,0,0)";
    const found = {
      paper_bgcolor: none,
      plot_bgcolor: none,
      font: { color: of("--ink"), family: getComputedStyle(document.body).fontFamily },
      modebar: { bgcolor: none, color: of("--line"), activecolor: of("--soft") },
      hoverlabel: { bgcolor: of("--card"), bordercolor: of("--line"), font: { color: of("--ink") }, align: "left" },
    };
    for (const axis of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
      found[axis] = { ...layout[axis], gridcolor: of("--grid"), linecolor: of("--line") };
    }
    return found;
  }

  function show(div) {
    const figure = JSON.parse(document.getElementById(div.dataset.figure).textContent);
    return Plotly.newPlot(div, figure.data, { ...figure.layout, ...colours(figure.layout) }, config);
  }

  function zoomTogether(div) {
    div.on("plotly_relayout", (change) => {
      const touches = Object.keys(change).some((key) => key.startsWith("xaxis.range"));
      if (touches) zoom(div.layout.xaxis.range, linked.filter((one) => one !== div));
    });
  }

  function zoom(range, divs) {
    for (const div of divs.filter(isShown)) {
      if (div.layout.xaxis.range.some((end, i) => end !== range[i])) Plotly.relayout(div, { "xaxis.range": [...range] });
    }
  }

  const isShown = (div) => div.closest("[hidden]") === null;

  function zoomOut() {
    const shown = linked.filter(isShown);
    zoom([0, Math.max(...shown.map((div) => div.layout.meta.length_ms))], shown);
  }

  function switchVariant(box) {
    for (const part of all("[data-variant]").filter((one) => one.dataset.variant === box.value)) {
      part.hidden = !box.checked;
      if (box.checked) part.querySelectorAll("[data-figure]").forEach((div) => Plotly.Plots.resize(div));
    }
    zoomOut();
  }

  Promise.all(figures.map(show)).then(() => {
    linked.forEach(zoomTogether);
    linked.forEach((div) => div.on("plotly_doubleclick", () => { zoomOut(); return false; }));
    const boxes = all(".switch input");
    boxes.forEach((box) => box.addEventListener("change", () => switchVariant(box)));
    boxes.filter((box) => !box.checked).forEach(switchVariant);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      figures.forEach((div) => Plotly.relayout(div, colours(div.layout)));
    });
    document.documentElement.dataset.ready = "yes";
  });
})();
