"use strict";
// The charts of a job's page. Whatever a job says goes through `plain`: Plotly takes some markup in texts.
const Charts = (() => {
  // Okabe and Ito's colours, which the colour-blind tell apart; pattern and thickness say the same once more.
  const POSTS = {
    pending: { name: "asked for, has no place", color: "#999999", pattern: ".", width: 0.25 },
    starting: { name: "starting", color: "#56B4E9", pattern: "/", width: 0.5 },
    warm: { name: "ready, in no world", color: "#E69F00", pattern: ".", width: 0.5 },
    training: { name: "training", color: "#009E73", pattern: "", width: 0.9 },
    leaving: { name: "leaving", color: "#D55E00", pattern: "x", width: 0.65 },
  };
  const PAUSES = {
    grow: { name: "pause: workers joined", color: "#E69F00", symbol: "triangle-up" },
    shrink: { name: "pause: workers left", color: "#CC79A7", symbol: "triangle-down" },
    failure: { name: "pause: failure", color: "#D55E00", symbol: "x" },
  };
  const SERIES = 6; // colours of lines, which page.css has for light and dark
  const SYMBOLS = ["circle", "diamond", "square", "triangle-up", "cross", "star"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const MOST_PATTERNED = 80; // lanes; thinner ones show no pattern
  const MOST_LINES = 250; // worlds that have a line each; of more there are ticks at the top
  const MOST_BREAKS = 100; // pauses that are drawn over the lanes
  const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset" };

  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const hue = (place) => color(`--series-${place % SERIES}`);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Plotly shows a number of milliseconds as the time of day in the browser's zone, with the offset of that moment.
  const clock = (data) => (seconds) => (seconds === null ? null : (data.began + seconds) * 1000);
  const shown = (moment) => moment - new Date(moment).getTimezoneOffset() * 60000; // that time of day, as if it were UTC

  // The moments that have the earliest and the latest time of day: as clocks go back, they need not be the first and the
  // last. Clocks go back at a quarter of an hour, and it matters in the first and the last two hours of a job.
  function whole(data, at) {
    const QUARTER = 900, times = [0, data.length], end = data.began + data.length;
    for (let place = 0; place < 8; place += 1) {
      const late = (Math.floor(end / QUARTER) - place) * QUARTER - data.began;
      const early = (Math.ceil(data.began / QUARTER) + place) * QUARTER - data.began;
      times.push(...[late - 0.001, late, early - 0.001, early].filter((time) => time > 0 && time < data.length));
    }
    const moments = times.map(at).sort((one, other) => shown(one) - shown(other));
    return [moments[0], moments[moments.length - 1]];
  }

  function layout(more) {
    const narrow = window.innerWidth < 600;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family: "system-ui, sans-serif", size: 12, color: color("--ink") },
      margin: { l: narrow ? 44 : 60, r: 12, t: 18, b: 36 }, hovermode: "closest",
      dragmode: narrow ? false : "zoom",
      hoverlabel: { bgcolor: color("--paper"), bordercolor: color("--line"), font: { color: color("--ink") }, align: "left" },
      ...more,
    };
  }

  function axis(more) {
    return { gridcolor: color("--line"), linecolor: color("--line"), zeroline: false, automargin: false, ...more };
  }

  function lanes(data, words) {
    const at = clock(data);
    const traces = Object.entries(POSTS).map(([post, look]) => {
      const trace = { type: "bar", orientation: "h", name: look.name, x: [], base: [], y: [], width: look.width, hovertext: [],
        hoverinfo: "text", textposition: "none", marker: { color: look.color, line: { width: 0 } } };
      if (look.pattern && data.lanes.length <= MOST_PATTERNED) {
        trace.marker.pattern = { shape: look.pattern, size: 6, solidity: 0.35, bgcolor: look.color, fgcolor: "#ffffff" };
      }
      for (const [worker, host, , , , spans] of data.lanes) {
        for (const [kind, since, until, reason] of spans) {
          if (kind !== post) continue;
          const end = until === null ? data.length : until;
          trace.x.push(shown(at(end)) - shown(at(since))); // by the clock, which may leave out an hour, or repeat it
          trace.base.push(at(since));
          trace.y.push(worker);
          trace.hovertext.push(`worker ${worker}${host ? " on " + plain(host) : ""}: ${look.name}<br>${words.span(since, end)}` +
            (reason ? `<br>${plain(words.wrap(reason))}` : ""));
        }
      }
      return trace;
    });
    const ids = data.lanes.map((lane) => lane[0]);
    const first = ids.length ? ids[0] : 0, last = ids.length ? ids[ids.length - 1] : 1;
    const room = Math.max(1, (last - first + 1) * 0.06);
    traces.push(...worlds(data, at, words, first - 0.6, last + 0.6, room));
    const height = Math.round(Math.max(190, Math.min(820, 26 * (last - first + 1) + 100)));
    const shape = layout({
      height, barmode: "overlay", uirevision: "lanes", shapes: breaks(data, at, first - 0.6, last + 0.6),
      xaxis: axis({ type: "date", range: whole(data, at) }),
      yaxis: axis({ range: [last + 0.7, first - 0.6 - room * 1.5], title: { text: "worker" }, showgrid: false,
        tickvals: ids.filter((id, place) => place % Math.ceil(ids.length / (ids.length > 40 ? 12 : 20)) === 0) }),
    });
    return Plotly.react("lanes", traces, shape, CONFIG);
  }

  // The longest pauses, as far as they are to be seen, over all lanes.
  function breaks(data, at, low, high) {
    const seen = data.pauses.filter((pause) => pause[3] > data.length / 400).sort((one, other) => other[3] - one[3]).slice(0, MOST_BREAKS);
    return seen.map((pause) => ({ type: "rect", x0: at(pause[2] - pause[3]), x1: at(pause[2]), y0: low, y1: high, layer: "above",
      fillcolor: color("--paper"), opacity: 0.72, line: { width: 1, color: PAUSES[pause[1]].color, dash: "dot" } }));
  }

  function worlds(data, at, words, low, high, room) {
    const many = data.worlds.length > MOST_LINES;
    const lines = { type: "scatter", mode: "lines", x: [], y: [], hoverinfo: "skip",
      line: { color: color("--ink"), width: 1, dash: "dot" }, opacity: many ? 0.6 : 0.45 };
    const heads = { type: "scatter", mode: "markers", name: "world", x: [], y: [], hovertext: [], hoverinfo: "text",
      marker: { symbol: "line-ns-open", size: 9, color: color("--ink") } };
    for (const [version, size, since, until, step, reason] of data.worlds) {
      if (!many) {
        lines.x.push(at(since), at(since), null);
        lines.y.push(low, high, null);
      }
      heads.x.push(at(since));
      heads.y.push(low - room * 0.3);
      heads.hovertext.push(`world ${version}: ${size} workers, from step ${step}<br>${plain(words.wrap(reason))}<br>` +
        words.span(since, until === null ? data.length : until));
    }
    const pauses = Object.entries(PAUSES).map(([kind, look]) => {
      const of = data.pauses.filter((pause) => pause[1] === kind);
      return { type: "scatter", mode: "markers", name: look.name, x: of.map((pause) => at(pause[2])), y: of.map(() => low - room),
        hovertext: of.map((pause) => `${look.name}, ${words.seconds(pause[3])}<br>to world ${pause[0]}`), hoverinfo: "text",
        marker: { symbol: look.symbol, size: 9, color: look.color, line: { width: 1, color: color("--paper") } } };
    });
    return [lines, heads, ...pauses];
  }

  function curves(data, words, bySteps) {
    const at = clock(data), points = data.points;
    const xs = bySteps ? points.step : points.time.map(at);
    const moment = points.time.map((time, place) => `step ${points.step[place].toLocaleString("en")}, ${words.since(time)}`);
    const measured = data.marks.filter((mark) => mark[1] === "evaluation");
    const names = [...new Set(measured.flatMap((mark) => Object.keys(mark[4]).filter((name) => name !== "seconds" && name !== "worker")))];
    const known = points.loss.filter((each) => each !== null);
    const steep = Math.min(...known) > 0 && Math.max(...known) > 30 * Math.min(...known);
    const rows = [[steep ? "loss (log)" : "loss", [line(points.loss, 0, "loss")]]];
    const losses = names.filter((name) => name === "loss"), others = names.filter((name) => name !== "loss");
    losses.forEach((name) => rows[0][1].push(evaluation(name, 1, "evaluated: loss")));
    if (others.length) rows.push([`evaluated: ${others.map(plain).join(", ")}`, others.map((name, place) => evaluation(name, place, plain(name)))]);
    rows.push(["learning rate", [line(points.rate, 2, "learning rate")]]);
    rows.push(["samples per second", [line(points.speed, 3, "samples/s")]]);
    const sizes = data.worlds.flatMap((world) => [[world[2], world[4], world[1]], [world[3] ?? data.length, null, world[1]]]);
    rows.push(["workers", [bySteps ? { ...line(points.workers, 4, "workers"), line: { shape: "hv", color: hue(4) } } : {
      type: "scatter", mode: "lines", x: sizes.map((each) => at(each[0])), y: sizes.map((each) => each[2]), name: "workers",
      line: { color: hue(4), width: 2, shape: "hv" }, fill: "tozeroy", hovertemplate: "%{y} workers<extra></extra>" }]]);

    function line(ys, place, name) {
      return { type: "scatter", mode: ys.length > 60 ? "lines" : "lines+markers", x: xs, y: ys, name, text: moment,
        line: { color: hue(place), width: 2 }, marker: { size: 5, symbol: SYMBOLS[place] },
        hovertemplate: `${name} %{y:.4g}<br>%{text}<extra></extra>` };
    }
    function evaluation(name, place, title) {
      const of = measured.filter((mark) => name in mark[4]);
      return { type: "scatter", mode: of.length > 200 ? "lines" : "lines+markers", name: title,
        x: of.map((mark) => (bySteps ? mark[3] : at(mark[0]))), y: of.map((mark) => mark[4][name]),
        line: { color: hue(place), width: 1.5, dash: DASHES[place % 6] }, marker: { symbol: SYMBOLS[(place + 1) % 6], size: 7 },
        hovertemplate: `${title} %{y:.4g}<extra></extra>` };
    }
    const gap = 0.06, each = (1 - gap * (rows.length - 1)) / rows.length;
    const shape = layout({ height: 150 * rows.length + 40, uirevision: bySteps ? "steps" : "time", annotations: [],
      xaxis: axis({ anchor: `y${rows.length}`, ...(bySteps ? { type: "linear", title: { text: "step" } } : { type: "date", range: whole(data, at) }) }) });
    const traces = rows.flatMap(([title, series], place) => {
      const high = 1 - place * (each + gap), axisName = place ? `y${place + 1}` : "y";
      shape[place ? `yaxis${place + 1}` : "yaxis"] = axis({ domain: [Math.max(0, high - each), high], anchor: "x", nticks: 5,
        ...(place && !title.startsWith("evaluated") ? { rangemode: "tozero" } : {}), ...(title.endsWith("(log)") ? { type: "log", dtick: 1, exponentformat: "e" } : {}) });
      const key = series.length > 1 ? `: ${series.map((one) => `<span style="color:${one.line.color}">${one.line.dash === undefined ? "━" : "┅"} ${one.name}</span>`).join("  ")}` : "";
      shape.annotations.push({ text: `<b>${key ? title.split(":")[0] : title}</b>${key}`, xref: "paper", x: 0, yref: "paper", y: high, xanchor: "left",
        yanchor: "bottom", showarrow: false, font: { size: 12 } });
      return series.map((one) => ({ ...one, yaxis: axisName }));
    });
    return Plotly.react("curves", traces, shape, CONFIG);
  }

  return { lanes, curves, POSTS, PAUSES };
})();
