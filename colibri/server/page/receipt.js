// The receipt, drawn: every number is the engine's own.

const $ = (id) => document.getElementById(id);
const PARTS = [
  ["plain", "plain steps"], ["verify", "verifying"], ["draft", "drafting"],
  ["absorb", "absorbing"], ["pick", "choosing"], ["text", "text, other turns"],
];
const HISTORY = 60;
const rates = [];

const round = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
const seconds = (s) => (s < 1 ? `${(s * 1000).toFixed(s < 0.01 ? 2 : 0)} ms` : `${s.toFixed(1)} s`);
const bytes = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(2)} GB` : n >= 1e6 ? `${round(n / 1e6)} MB` : `${round(n / 1e3)} kB`);
const count = (n) => n.toLocaleString("en");

function bar(node, parts) {
  const whole = parts.reduce((sum, [value]) => sum + value, 0);
  node.replaceChildren(...parts.filter(([value]) => value > 0).map(([value, color]) => {
    const piece = document.createElement("i");
    piece.className = color;
    piece.style.width = `${(100 * value) / whole}%`;
    return piece;
  }));
}

function drawTime(turn) {
  const tokens = Math.max(turn.answer_tokens, 1);
  const parts = PARTS.map(([name, label], i) => [turn.segments[name] || 0, `k${i}`, label]);
  const shown = parts.filter(([value]) => value > 0);
  bar($("time"), shown);
  const words = shown.map(([value, , label]) => `${label} ${seconds(value / tokens)}`);
  $("time").setAttribute("aria-label", `A token's time: ${words.join(", ") || "nothing yet"}`);
  $("legend").replaceChildren(...shown.map(([, color], i) => {
    const item = document.createElement("li");
    const dot = item.appendChild(document.createElement("i"));
    dot.className = color;
    item.append(words[i]);
    return item;
  }));
}

function drawDrafts(turn) {
  const offered = turn.offered_by_position;
  $("drafts").replaceChildren(...offered.map((of, i) => {
    const kept = turn.accepted_by_position[i];
    const item = document.createElement("li");
    const [place, stack, words] = ["span", "div", "span"].map((n) => item.appendChild(document.createElement(n)));
    place.textContent = i + 1;
    stack.className = "stack";
    bar(stack, [[kept, "k0"], [of - kept, "k5"], [offered[0] - of, ""]]);
    words.textContent = `${count(kept)} of ${count(of)}`;
    return item;
  }));
  const kept = turn.accepted_by_position.reduce((a, b) => a + b, 0);
  const each = turn.tokens_per_forward;
  $("drafted").textContent = turn.proposed
    ? `${count(kept)} of ${count(turn.proposed)} drafts kept; ${each ? each.toFixed(2) : "–"} tokens a pass`
    : "nothing was drafted";
}

function drawExperts(turn) {
  const found = turn.experts || turn.answer_experts;
  const hit = found.used - found.missed;
  bar($("hits"), [[hit, "k0"], [found.missed, "k1"]]);
  const share = found.used ? ` (${((100 * hit) / found.used).toFixed(1)}%)` : "";
  const text = `${count(hit)} in memory${share}, ${count(found.missed)} missed`
    + (found.missed ? `: ${bytes(found.read_bytes)} read, ${seconds(found.wait_seconds)} waited` : "");
  $("hits").setAttribute("aria-label", text);
  $("experts").textContent = text;
}

function drawMap(residency, model) {
  const { rows, layers, kind } = residency;
  const canvas = $("map");
  if (!rows.length) return;
  const [width, height] = [rows[0].length, rows.length];
  // Whole pixels a cell, so that the map stays sharp: a canvas is only ever scaled up.
  canvas.width = width;
  canvas.height = height;
  canvas.style.aspectRatio = `${width} / ${Math.min(height * (width < 64 ? 1.4 : 1), width)}`;
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  pen.fillStyle = style.getPropertyValue("--code");
  pen.fillRect(0, 0, width, height);
  pen.fillStyle = style.getPropertyValue("--accent");
  let warm = 0;
  rows.forEach((row, y) => {
    for (let x = 0; x < width; x += 1) {
      const level = Number(row[x]);
      if (!level) continue;
      warm += 1;
      pen.globalAlpha = 0.15 + (0.85 * level) / 9;
      pen.fillRect(x, y, 1, 1);
    }
  });
  pen.globalAlpha = 1;
  const share = ((100 * warm) / (width * height)).toFixed(0);
  const what = kind === "resident"
    ? `${share}% of all experts are in memory (${model.io}, ${model.slots_per_layer} a layer), brighter: used more, or later`
    : `${share}% of all experts were used lately, brighter: more often; the page cache keeps them`;
  $("map-text").textContent = `Layers ${layers[0]} to ${layers[layers.length - 1]} downwards, `
    + `experts 0 to ${width - 1} across. ${what}.`;
}

function drawRates(turn) {
  if (turn.running && turn.answer_tokens_per_second) {
    rates.push(turn.answer_tokens_per_second);
    if (rates.length > HISTORY) rates.shift();
  }
  $("spark").toggleAttribute("hidden", rates.length < 2);
  if (rates.length < 2) return;
  const most = Math.max(...rates);
  const points = rates.map((rate, i) => `${(240 * i) / (rates.length - 1)},${34 - (31 * rate) / most}`);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", `M${points.join("L")}`);
  $("spark").replaceChildren(path);
}

export function draw(state) {
  drawMap(state.residency, state.model);
  const turn = state.turns[0];
  if (!turn) return;
  $("which").textContent = turn.running ? "of the running answer" : "of the last answer";
  $("rate").textContent = turn.answer_tokens_per_second ? round(turn.answer_tokens_per_second) : "–";
  $("first").textContent = turn.first_token_seconds != null ? seconds(turn.first_token_seconds) : "–";
  const cached = turn.cached_tokens ? ` (${count(turn.cached_tokens)} cached)` : " tokens";
  $("read").textContent = turn.read_tokens < turn.prompt_tokens
    ? `${count(turn.read_tokens)} of ${count(turn.prompt_tokens)} read`
    : `${count(turn.prompt_tokens)}${cached}`;
  $("made").textContent = `${count(turn.answer_tokens)} tokens`;
  drawTime(turn);
  drawDrafts(turn);
  drawExperts(turn);
  drawRates(turn);
}
