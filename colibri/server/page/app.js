// The page: a chat on the left, what the machine does on the right.

import * as api from "./api.js";
import { render } from "./markdown.js";
import { draw } from "./receipt.js";

const $ = (id) => document.getElementById(id);
const STORE = "colibri-chat";
const EVERY = 1000; // milliseconds between two looks at an idle server
const RUNNING = 300; // and at a busy one

let messages = JSON.parse(sessionStorage.getItem(STORE) || "[]");
let running = null; // AbortController of the answer being written
let known = false; // whether the server answered the last look

// ---- messages -----------------------------------------------------------------------------------

function element(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

class Said {
  constructor(message) {
    this.message = message;
    this.node = element("article", `said ${message.role}`);
    this.node.append(element("div", "who", message.role === "user" ? "You" : "colibri"));
    this.fold = null;
    this.body = this.node.appendChild(element("div", "body"));
    this.note = this.node.appendChild(element("p", "note"));
    this.note.hidden = true;
    this.draw();
  }

  draw() {
    const { role, content, reasoning_content: reasoning } = this.message;
    if (reasoning) this.drawReasoning(reasoning);
    if (role === "user") this.body.textContent = content;
    else this.body.replaceChildren(render(content));
    if (this.message.note) this.say(this.message.note, this.message.bad);
  }

  drawReasoning(text) {
    if (!this.fold) {
      this.fold = element("details", "reasoning");
      this.fold.append(element("summary", "", "Reasoning"), element("div"));
      this.fold.open = !this.message.content;
      this.body.before(this.fold);
    }
    this.fold.lastChild.textContent = text;
    if (this.message.content && !this.folded) {
      this.folded = true; // once: whoever opens it again wants it open
      this.fold.open = false;
    }
  }

  say(text, bad) {
    this.note.textContent = text;
    this.note.classList.toggle("bad", Boolean(bad));
    this.note.hidden = !text;
  }
}

function show(message) {
  $("empty").hidden = true;
  const said = new Said(message);
  $("log").append(said.node);
  return said;
}

function atEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function toEnd() {
  $("log").scrollTop = $("log").scrollHeight;
}

function store() {
  sessionStorage.setItem(STORE, JSON.stringify(messages));
}

// ---- an answer ----------------------------------------------------------------------------------

function request() {
  const body = {
    messages: messages.filter((m) => !m.failed).map(({ role, content }) => ({ role, content })),
  };
  const number = (id, name) => {
    if ($(id).value !== "") body[name] = Number($(id).value);
  };
  number("temperature", "temperature");
  number("limit", "max_tokens");
  number("seed", "seed");
  if ($("think").value) body.chat_template_kwargs = { enable_thinking: $("think").value === "on" };
  return body;
}

const ENDS = { length: "stopped at the limit of tokens", stop: "", tool_calls: "" };

async function answer() {
  const body = request();
  const conversation = messages;
  const message = { role: "assistant", content: "", reasoning_content: "" };
  const said = show(message);
  let drawn = false;
  const redraw = () => {
    if (drawn) return;
    drawn = true;
    requestAnimationFrame(() => {
      const follow = atEnd();
      drawn = false;
      said.draw();
      if (follow) toEnd();
    });
  };
  running = new AbortController();
  said.node.classList.add("writing");
  busy(true);
  toEnd();
  try {
    await api.chat(body, running.signal, (delta, finish) => {
      message.content += delta.content || "";
      message.reasoning_content += delta.reasoning_content || "";
      if (finish) message.note = ENDS[finish];
      redraw();
    });
    if (!message.content && !message.note) message.note = "the model said nothing";
  } catch (error) {
    fail(message, error);
  }
  running = null;
  said.node.classList.remove("writing");
  busy(false);
  look();
  if (messages !== conversation) return; // a new chat was begun meanwhile
  messages.push(message);
  store();
  said.draw();
  if (message.failed) offerAgain(said);
  if (atEnd()) toEnd();
}

function fail(message, error) {
  if (error.name === "AbortError") {
    message.note = "stopped";
    return;
  }
  if (error.status === 401) askKey();
  const lost = error instanceof TypeError;
  message.note = lost ? "the server cannot be reached" : error.message;
  message.bad = true;
  message.failed = true;
}

function offerAgain(said) {
  const again = said.note.appendChild(element("button", "", "Try again"));
  again.type = "button";
  again.addEventListener("click", () => {
    messages = messages.filter((m) => m !== said.message);
    said.node.remove();
    $("prompt").focus();
    answer();
  });
}

function busy(on) {
  $("send").disabled = on;
  $("stop").disabled = !on;
  $("log").setAttribute("aria-busy", String(on));
  if (!on && document.activeElement === document.body) $("prompt").focus();
}

function send() {
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  $("prompt").value = "";
  const message = { role: "user", content: text };
  messages = messages.filter((m) => !m.failed);
  messages.push(message);
  store();
  show(message);
  answer();
}

// ---- the server ---------------------------------------------------------------------------------

function say(text, className) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").className = className;
}

function askKey() {
  if (!$("ask-key").open) $("ask-key").showModal();
}

let timer = 0;
async function look() {
  clearTimeout(timer);
  let wait = EVERY;
  try {
    const state = await api.state();
    known = true;
    const { active, waiting } = state.now;
    say(active ? `answering ${active}${waiting ? `, ${waiting} waiting` : ""}` : "ready", active ? "busy" : "ok");
    $("model").textContent = `${state.model.id} · ${state.model.context.toLocaleString("en")} tokens`;
    $("think-label").hidden = !state.model.thinking_switch;
    draw(state);
    if (active || running) wait = RUNNING;
  } catch (error) {
    if (error.status === 401) askKey();
    say(error.status === 401 ? "key needed" : known ? "server gone, trying again" : "no server, trying again", "gone");
  }
  if (document.hidden) wait = 5000;
  clearTimeout(timer);
  timer = setTimeout(look, wait);
}

// ---- wiring -------------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("stop").addEventListener("click", () => { if (running) running.abort(); $("prompt").focus(); });
$("fresh").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  store();
  for (const node of document.querySelectorAll(".said")) node.remove();
  $("empty").hidden = false;
  $("prompt").focus();
});
$("toggle").addEventListener("click", () => {
  const on = document.body.classList.toggle("receipt");
  $("toggle").textContent = on ? "Chat" : "Receipt";
  $("toggle").setAttribute("aria-expanded", String(on));
});
$("key-form").addEventListener("submit", () => { api.key.set($("key").value); look(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });

for (const message of messages) {
  const said = show(message);
  if (message.failed) offerAgain(said);
}
toEnd();
$("prompt").focus();
look();
