// Unpacks the drawing library and the figures of the page, and draws them: in the colours that the reader's system asks
// for, and on narrow screens with legends below.
const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";
const config = {
  displaylogo: false, responsive: true,
  modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]], // none that would send anything anywhere
};
const dark = matchMedia("(prefers-color-scheme: dark)"), narrow = matchMedia("(max-width: 40rem)");

async function unpacked(element) {
  const text = element.textContent, value = new Uint8Array(128);
  for (let at = 0; at < DIGITS.length; at += 1) value[DIGITS.charCodeAt(at)] = at;
  const words = new DataView(new ArrayBuffer((text.length / 5) * 4));
  for (let at = 0; at < text.length; at += 5) {
    let word = 0;
    for (let digit = 0; digit < 5; digit += 1) word = word * 85 + value[text.charCodeAt(at + digit)];
    words.setUint32((at / 5) * 4, word);
  }
  const [length, packed] = [words.getUint32(0), words.buffer.slice(4)];
  const stream = new Blob([packed.slice(0, length)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function template() {
  const [text, grid, paper] = dark.matches ? ["#d8dee6", "#39424d", "#161a1f"] : ["#222", "#e6e9ee", "#fff"];
  const axis = { gridcolor: grid, linecolor: grid, zerolinecolor: grid, automargin: true, ticks: "outside", tickcolor: grid };
  return { layout: {
    font: { color: text, size: narrow.matches ? 10 : 12 }, paper_bgcolor: paper, plot_bgcolor: paper, xaxis: axis, yaxis: axis,
    margin: narrow.matches ? { l: 4, r: 4, t: 40, b: 40 } : { l: 10, r: 10, t: 40, b: 40 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: "#888" }, hoverlabel: { font: { size: 12 } },
    ...(narrow.matches ? { legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom" } } : {}),
  } };
}

// what a figure is on a narrow screen: legends and colour bars below, and a finger that scrolls the page
function fitted({ data, layout }) {
  layout = { ...layout, template: template() };
  if (!narrow.matches) return { data, layout };
  const below = data.filter((trace) => trace.showlegend !== false && trace.name).length;
  const bars = data.some((trace) => trace.colorbar);
  const more = layout.showlegend === false || below < 2 ? 0 : 20 + 12 * below;
  const barBelow = ({ title, ...bar }) => ({ ...bar, orientation: "h", y: 0, yref: "container", yanchor: "bottom", thickness: 12,
    title: { ...title, side: "top" } });
  return {
    data: data.map((trace) => (trace.colorbar ? { ...trace, colorbar: barBelow(trace.colorbar) } : trace)),
    layout: { ...layout, dragmode: false, height: (layout.height ?? 450) + more + (bars ? 60 : 0),
      margin: { b: 50 + more + (bars ? 60 : 0) } },
  };
}

async function draw() {
  for (const [place, figure] of figures) {
    const { data, layout } = fitted(figure);
    await Plotly.react(place, data, layout, config);
  }
  document.body.dataset.drawn = Number(document.body.dataset.drawn ?? 0) + 1;
}

const figures = [];
(async () => {
  const script = document.createElement("script");
  script.textContent = await unpacked(document.getElementById("plotly"));
  document.head.append(script);
  for (const place of document.querySelectorAll(".figure")) {
    figures.push([place, JSON.parse(await unpacked(place.firstElementChild))]);
    place.replaceChildren();
  }
  await draw();
  for (const query of [dark, narrow]) query.addEventListener("change", draw);
})();
