"use strict";
// A job's page, or the list of jobs: fills what is there, and goes on as news come. Texts of a job are only ever set as text.
(() => {
  const $ = (id) => document.getElementById(id);
  const view = document.documentElement.dataset.view;
  const POLL = 1500, SLOWEST = 30000, TRIES = 5, MOST_ROWS = 100, MOST_TILES = 10;
  let data = null, bySteps = false, refill = () => {};

  // ---- words ----
  const seconds = (value) => (value === null || value === undefined ? "" : value < 10 ? `${value.toPrecision(2)} s` : elapsed(value));
  const elapsed = (value) => {
    const whole = Math.round(value), part = (each) => String(each).padStart(2, "0");
    return `${Math.floor(whole / 3600)}:${part(Math.floor(whole / 60) % 60)}:${part(whole % 60)}`;
  };
  const words = {
    seconds,
    since: (time) => `${elapsed(time)} after its start`,
    span: (since, until) => `from ${elapsed(since)} to ${elapsed(until)}, ${seconds(until - since)}`,
    wrap: (text) => (text.length > 120 ? text.slice(0, 117) + "..." : text),
  };
  const number = (value) => (value === null || value === undefined ? "" : Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(4)).toString());

  // ---- pieces ----
  function element(tag, text, attributes = {}) {
    const made = document.createElement(tag);
    if (text !== undefined && text !== null) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  // Columns: [title, is a number]. Cells: text, a number or an element. Long tables begin with some rows, and a button.
  function table(id, caption, columns, rows) {
    const target = $(id);
    const most = target.dataset.all ? rows.length : MOST_ROWS;
    const key = JSON.stringify(rows.slice(0, most).map((row) => row.map((cell) => (cell instanceof Node ? cell.outerHTML : cell)))) + rows.length;
    if (target.dataset.key === key) return;
    target.dataset.key = key;
    const head = element("thead"), titles = element("tr"), body = element("tbody");
    columns.forEach(([title, numeric]) => titles.append(element("th", title, { scope: "col", ...(numeric ? { class: "number" } : {}) })));
    head.append(titles);
    for (const row of rows.slice(0, most)) {
      const line = element("tr");
      row.forEach((cell, place) => {
        const numeric = columns[place][1];
        const made = element(place ? "td" : "th", undefined, { ...(place ? {} : { scope: "row" }), ...(numeric ? { class: "number" } : {}) });
        made.append(cell instanceof Node ? cell : numeric && typeof cell === "number" ? number(cell) : cell ?? "");
        line.append(made);
      });
      body.append(line);
    }
    const focused = target.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    target.replaceChildren(element("caption", caption), head, body);
    if (focused) target.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
    target.closest("section").hidden = false;
    target.parentElement.hidden = rows.length === 0;
    let more = target.parentElement.nextElementSibling;
    if (!more?.classList.contains("more")) {
      more = element("button", "", { type: "button", class: "more" });
      more.addEventListener("click", () => { target.dataset.all = "1"; delete target.dataset.key; refill(); });
      target.parentElement.after(more);
    }
    more.hidden = rows.length <= most;
    more.textContent = `Show all ${rows.length.toLocaleString("en")} rows`;
  }

  const label = (text, pixels) => (pixels > 8 * text.length ? [element("span", text)] : []);

  function swatch(kind, name) {
    const both = element("span");
    both.append(element("i", undefined, { class: `swatch of-${kind}` }), element("span", name));
    return both;
  }

  // ---- a job ----
  function fillHead() {
    document.title = `${data.job} · elasticdl`;
    $("job").textContent = data.job;
    $("phase").textContent = data.phase;
    $("phase").className = `phase ${["succeeded", "running"].includes(data.phase) ? "good" : ["failed", "lost", "waiting"].includes(data.phase) ? "bad" : ""}`;
    $("reason").textContent = data.reason;
    $("facts").replaceChildren(...Object.entries(data.facts).filter(([, value]) => value !== "").map(([name, value]) => {
      const both = element("div");
      both.append(element("dt", name), element("dd", value));
      return both;
    }));
    const tiles = $("facts").children.length; // in rows of about the same length: none stands alone
    $("facts").style.setProperty("--columns", Math.ceil(tiles / Math.ceil(tiles / MOST_TILES)) || 1);
    $("sentence").textContent = data.sentence;
    const shares = data.spent.filter((each) => each.share > 0);
    const bar = $("bar");
    if (bar.dataset.kinds !== shares.map((each) => each.id).join()) {
      bar.dataset.kinds = shares.map((each) => each.id).join();
      bar.replaceChildren(...shares.map((each) => element("div", undefined, { class: `of-${each.id}` })));
    }
    shares.forEach((each, place) => {
      const part = bar.children[place];
      part.style.flexGrow = each.share;
      part.style.flexBasis = "0";
      part.title = `${each.name}: ${each.percent}, ${each.seconds}`;
      part.replaceChildren(...label(`${each.name} ${each.percent}`, each.share * bar.clientWidth));
    });
    $("remarks").replaceChildren(...data.remarks.map((each) => element("li", each)));
    $("warnings").replaceChildren(...data.warnings.map(([time, text]) => element("li", `${elapsed(time)}  ${text}`)));
    $("warnings").parentElement.hidden = data.warnings.length === 0;
    $("advice").textContent = data.advice.text;
  }

  // The tables that are open, or always there.
  function fillTables() {
    const open = (id) => $(id).open;
    const spent = data.spent.map((each) => [swatch(each.id, each.name), each.percent, each.seconds, each.workers, each.worker_seconds, each.means]);
    table("spent", "Shares of the job's time, and of the time of all workers together", [["what"], ["of the time", true], ["time", true],
      ["of worker-seconds", true], ["worker-seconds", true], ["meaning"]], spent);
    const parts = ["notice", "drain", "rendezvous", "init", "sync", "first_step"];
    const pauses = [...data.pauses].sort((one, other) => other[3] - one[3]).map(([world, kind, time, total, workers, torn, split]) =>
      [world, { grow: "joined", shrink: "left", failure: "failure" }[kind] ?? kind, elapsed(time), total, ...parts.map((part) => split[part] ?? null), workers, torn]);
    table("pauses", "Pauses, the longest first", [["to world", true], ["change"], ["at", true], ["total", true],
      ...parts.map((part) => [part.replace("_", " "), true]), ["survivors", true], ["steps torn", true]], pauses);
    const troubles = data.marks.filter((mark) => mark[1].startsWith("worker_")).map(([time, event, text, , value]) =>
      [elapsed(time), value.worker ?? "", event.replace("worker_", ""), value.factor ?? null, value.seconds ?? null, text]);
    table("troubles", "Workers that were found slow or stuck", [["at", true], ["worker", true], ["was found"], ["times slower", true], ["seconds", true], ["where"]], troubles);
    const speedup = data.advice.curve.map(([workers, times, measured]) => [workers, times, measured ? "measured" : "estimate"]);
    table("speedup", "Speedup by number of workers", [["workers", true], ["speedup", true], ["how"]], speedup);
    $("warnings").closest("section").hidden = !(data.warnings.length || troubles.length || data.advice.text);
    if (open("workers-details")) {
      $("causes").textContent = Object.entries(data.causes).map(([cause, times]) => `${times} ${cause || "unknown"}`).join(", ");
      table("workers", "Workers", [["worker", true], ["host"], ["ended"], ["why"], ["exit code", true], ["starting", true], ["ready", true], ["training", true], ["leaving", true]],
        data.lanes.map(([worker, host, cause, reason, code, spans]) => {
          const spent = (post) => spans.filter((span) => span[0] === post).reduce((sum, span) => sum + (span[2] ?? data.length) - span[1], 0);
          const end = data.over ? "with the job" : data.phase === "lost" ? "not known" : "is there";
          return [worker, host, cause || end, reason, code,
            ...["starting", "warm", "training", "leaving"].map((post) => seconds(spent(post)))];
        }));
    }
    if (open("worlds-details")) {
      table("worlds", "Worlds", [["world", true], ["workers", true], ["from", true], ["lasted", true], ["step", true], ["reason"], ["came"], ["went"]],
        data.worlds.map(([version, size, since, until, step, reason, came, went]) =>
          [version, size, elapsed(since), seconds((until ?? data.length) - since), step, reason, came, went]));
    }
    if (open("points-details")) {
      const points = data.points;
      table("points", "Curves", [["step", true], ["at", true], ["loss", true], ["learning rate", true], ["samples/s", true], ["workers", true]],
        points.step.map((step, place) => [step, elapsed(points.time[place]), points.loss[place], points.rate[place], points.speed[place], points.workers[place]]));
    }
    if (open("evaluations-details")) {
      const measured = data.marks.filter((mark) => mark[1] === "evaluation");
      const names = [...new Set(measured.flatMap((mark) => Object.keys(mark[4]).filter((name) => name !== "worker")))];
      table("evaluations", "Evaluations", [["step", true], ["at", true], ...names.map((name) => [name, true])],
        measured.map((mark) => [mark[3], elapsed(mark[0]), ...names.map((name) => mark[4][name] ?? null)]));
    }
    if (open("marks-details")) {
      table("marks", "Events", [["at", true], ["event"], ["step", true], ["text"]],
        data.marks.filter((mark) => mark[1] !== "evaluation").map(([time, event, text, step]) => [elapsed(time), event.replaceAll("_", " "), step || null, text]));
    }
  }

  function drawCharts() {
    Charts.lanes(data, words);
    Charts.curves(data, words, bySteps);
  }

  function showJob(news) {
    data = news;
    refill = fillTables;
    fillHead();
    fillTables();
    drawCharts();
    document.documentElement.dataset.drawn = String(data.length);
  }

  function prepareJob() {
    const key = [...Object.values(Charts.POSTS), ...Object.values(Charts.PAUSES)].map((look) => {
      const item = element("li"), mark = element("i", { "triangle-up": "▲", "triangle-down": "▼", x: "✖" }[look.symbol], look.symbol ? {} : { class: "swatch" });
      if (look.symbol) mark.style.color = look.color;
      else {
        const stripes = { ".": `radial-gradient(#fff 1px, ${look.color} 1.5px) 0 0 / 5px 5px`, "/": `repeating-linear-gradient(135deg, ${look.color} 0 4px, #fff 4px 6px)`,
          x: `repeating-linear-gradient(45deg, #fff 0 2px, transparent 2px 6px), repeating-linear-gradient(135deg, #fff 0 2px, ${look.color} 2px 6px)` };
        mark.style.background = stripes[look.pattern] ?? look.color;
        mark.style.height = `${Math.round(16 * look.width)}px`;
      }
      mark.style.fontStyle = "normal";
      item.append(mark, element("span", ` ${look.name}`));
      return item;
    });
    const world = element("li", "┊ a new world");
    $("lane-key").replaceChildren(...key, world);
    for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", fillTables);
    for (const id of ["by-time", "by-step"]) {
      $(id).addEventListener("click", () => {
        bySteps = id === "by-step";
        $("by-time").setAttribute("aria-pressed", String(!bySteps));
        $("by-step").setAttribute("aria-pressed", String(bySteps));
        drawCharts();
      });
    }
    let waiting = 0;
    window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => data && drawCharts(), 200); });
  }

  // ---- the list ----
  function showJobs(jobs) {
    refill = () => showJobs(jobs);
    const rows = jobs.map((job) => {
      const link = element("a", job.name, { href: job.page });
      return [link, ...(job.namespace ? [job.namespace] : [""]), job.phase, job.workers, job.step, job.elapsed, job.reason];
    });
    table("jobs", "All jobs, the newest first", [["job"], ["namespace"], ["phase"], ["workers"], ["step", true], ["elapsed", true], ["reason"]], rows);
    $("empty").hidden = jobs.length > 0;
    document.documentElement.dataset.drawn = String(jobs.length);
  }

  // ---- colours ----
  function prepareTheme() {
    const root = document.documentElement, system = window.matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
    const tell = () => { $("theme").setAttribute("aria-pressed", String(isDark())); if (data) drawCharts(); };
    $("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; tell(); });
    system.addEventListener("change", tell);
    tell();
  }

  // ---- news ----
  function notice(text, action) {
    const target = $("notice");
    if (target.dataset.text === text) return;
    target.dataset.text = text;
    target.hidden = !text;
    target.replaceChildren(text, ...(action ? [" ", action] : []));
  }

  function follow(show) {
    let revision = "", failures = 0, gone = false, told = "";
    async function ask() {
      let wait = POLL;
      try {
        const answer = await fetch(`data.json?since=${encodeURIComponent(revision)}`, { cache: "no-store", referrerPolicy: "no-referrer", signal: AbortSignal.timeout(60000) });
        if (answer.status === 200) {
          const news = await answer.json();
          revision = news.revision;
          told = news.notice || "";
          notice(told);
          const began = performance.now();
          if (news.content !== null) show(news.content); // it is null while a page fails
          wait = Math.max(POLL, 5 * (performance.now() - began)); // a large page leaves the browser most of its time
        } else if (answer.status === 404) {
          notice("This job is not there any more. What is shown is what was told of it last.");
          wait = 10 * POLL;
        } else if (answer.status !== 204) throw new Error(`the dashboard answered ${answer.status}`);
        else if (failures || gone) notice(told);
        failures = 0;
        gone = answer.status === 404;
        if (answer.headers.get("X-Job-Over")) wait = 10 * POLL;
      } catch (error) {
        failures += 1;
        if (failures >= TRIES) {
          const again = element("button", "Try again", { type: "button" });
          again.addEventListener("click", () => { failures = 0; notice(""); ask(); });
          notice("The dashboard has ended, or can't be reached. What is shown is what it told last.", again);
          return;
        }
        notice("The dashboard does not answer at the moment.");
        wait = Math.min(SLOWEST, POLL * 2 ** failures / 2);
      }
      setTimeout(ask, document.hidden ? 4 * wait : wait);
    }
    notice("Reading the journals ...");
    ask();
  }

  if (view === "job") prepareJob();
  prepareTheme();
  const shipped = $("data");
  if (shipped) showJob(JSON.parse(shipped.textContent));
  else follow(view === "job" ? showJob : showJobs);
})();
