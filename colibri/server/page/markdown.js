// Markdown in small: paragraphs, headings, lists, fenced and inline code, bold, italic, links.
// Everything becomes DOM nodes by textContent, so nothing in an answer can become markup.

const INLINE = /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(.+?)\*\*|\*([^\s*](?:[^*]*[^\s*])?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;

function element(name, text, className) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

function inline(parent, text) {
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    parent.append(text.slice(at, found.index));
    at = found.index + found[0].length;
    if (found[2] !== undefined) parent.append(element("code", found[2]));
    else if (found[3] !== undefined) inline(parent.appendChild(element("strong")), found[3]);
    else if (found[4] !== undefined) inline(parent.appendChild(element("em")), found[4]);
    else {
      const link = element("a", found[5]);
      link.href = found[6];
      link.rel = "noreferrer noopener";
      link.target = "_blank";
      parent.append(link);
    }
  }
  parent.append(text.slice(at));
}

function codeBlock(language, lines) {
  const block = element("div", undefined, "block");
  const bar = block.appendChild(element("div"));
  bar.append(element("span", language || "code", "quiet"));
  const copy = bar.appendChild(element("button", "Copy"));
  copy.type = "button";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(lines.join("\n"));
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  const pre = block.appendChild(element("pre"));
  pre.tabIndex = 0;
  pre.setAttribute("aria-label", `${language || "code"} block`);
  pre.append(element("code", lines.join("\n")));
  return block;
}

// Cuts text into blocks: {kind, lines, ...}. An open fence runs to the end: it is being written.
function blocks(text) {
  const found = [];
  let last = null;
  let fence = null;
  for (const line of text.split("\n")) {
    const mark = line.match(/^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)\s*$/);
    if (fence) {
      if (mark && line.trim().startsWith(fence.mark) && !mark[2]) fence = null;
      else fence.lines.push(line);
      continue;
    }
    if (mark) {
      fence = { kind: "code", mark: mark[1], language: mark[2], lines: [] };
      found.push(fence);
      last = null;
      continue;
    }
    const heading = line.match(/^(#{1,6})\s+(.*)$/);
    const item = line.match(/^\s*(?:[-*+]|(\d+)[.)])\s+(.*)$/);
    if (!line.trim()) last = null;
    else if (heading) { found.push({ kind: "heading", lines: [heading[2]] }); last = null; }
    else if (item) {
      const kind = item[1] === undefined ? "ul" : "ol";
      if (!last || last.kind !== kind) {
        found.push(last = { kind, lines: [], start: Number(item[1] || 1) });
      }
      last.lines.push(item[2]);
    } else if (last && last.kind !== "text") last.lines[last.lines.length - 1] += `\n${line}`;
    else if (last) last.lines.push(line);
    else found.push(last = { kind: "text", lines: [line] });
  }
  return found;
}

export function render(text) {
  const fragment = document.createDocumentFragment();
  for (const block of blocks(text)) {
    if (block.kind === "code") fragment.append(codeBlock(block.language, block.lines));
    else if (block.kind === "heading") {
      inline(fragment.appendChild(element("h3")), block.lines[0]);
    } else if (block.kind === "text") {
      const paragraph = fragment.appendChild(element("p"));
      block.lines.forEach((line, i) => {
        if (i) paragraph.append(element("br"));
        inline(paragraph, line);
      });
    } else {
      const list = fragment.appendChild(element(block.kind));
      if (block.kind === "ol") list.start = block.start;
      for (const line of block.lines) inline(list.appendChild(element("li")), line);
    }
  }
  return fragment;
}
