// Markdown of a reply as elements. Text enters through textContent and text nodes alone, so HTML in
// a reply stays text; links lead to http and https only; pictures become links and load nothing.
// Every pattern is linear or bounded: no text, however hostile, holds the page up.

import { element } from "./dom.js";

const MAX_DEPTH = 6; // of quotes, lists and emphasis within each other; deeper ones stay text
const MAX_OPEN = 20_000; // characters that are drawn again while a reply grows

const FENCE = /^ *(`{3,}(?=[^`]*$)|~{3,}) *([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+(.*)/;
const QUOTE = /^ {0,3}> ?(.*)/;
const INLINE = new RegExp(
  [
    /\\([!-/:-@[-`{-~])/, // 1: an escaped character
    /``([^`]+(?:`[^`]+)*)``|`([^`]+)`/, // 2, 3: code
    /!?\[([^[\]]{0,500})\]\(<?((?:[^()<>\s]|\([^()<>\s]{0,200}\)){1,2000})>?(?: "[^"]{0,200}")?\)/, // 4, 5: a link
    /\bhttps?:\/\/[^\s<>()[\]"'`*]{1,2000}/, // a bare address
    /\*\*(?=\S)([^]{0,1000}?\S)\*\*(?!\*)|\b__(?=\S)([^]{0,1000}?\S)__\b/, // 6, 7: bold
    /\*(?=[^\s*])([^*]{0,2000}[^\s*])\*|\b_(?=[^\s_])([^_]{0,2000}[^\s_])_\b/, // 8, 9: italic
    /~~(?=\S)([^~]{1,2000})~~/, // 10: struck out
  ]
    .map((pattern) => pattern.source)
    .join("|"),
  "g",
);

// A reply that grows. What ends with an empty line is drawn once; only the part after it is drawn
// again, at most once a frame.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.open = ""; // text of the last part
    this.fence = null; // its open code block
    this.line = ""; // a line whose end has not come
    this.drawn = []; // elements of the last part
    this.frame = null;
  }

  append(text) {
    const lines = (this.line + text).split("\n");
    this.line = lines.pop();
    for (const line of lines) this._take(line);
    if (this.fence === null && this.line.length > MAX_OPEN) {
      this._take(this.line);
      this.line = "";
    }
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  // What came so far; also at the end of a reply, where the page may be hidden and has no frames.
  draw() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
    this._replace(this.open + this.line);
  }

  _take(line) {
    this.open += `${line}\n`;
    this.fence = nextFence(this.fence, line);
    if (this.fence !== null || (line.trim() && this.open.length < MAX_OPEN)) return;
    this._replace(this.open);
    this.drawn = [];
    this.open = "";
  }

  _replace(text) {
    for (const old of this.drawn) old.remove();
    this.drawn = blocks(text.split("\n"), 0);
    this.root.append(...this.drawn);
  }
}

// The code block that is open after `line`, or null.
function nextFence(fence, line) {
  const found = FENCE.exec(line);
  if (fence === null) return found ? found[1] : null;
  const closes = found && found[1].startsWith(fence) && !line.slice(found[0].length).trim();
  return closes && !found[2] ? null : fence;
}

function blocks(lines, depth) {
  const made = [];
  let at = 0;
  while (at < lines.length) {
    const block = depth < MAX_DEPTH ? structured(lines, at, depth) : null;
    if (block) {
      made.push(block.made);
      at = block.end;
    } else if (!lines[at].trim()) {
      at += 1;
    } else {
      const end = endOfParagraph(lines, at, depth);
      made.push(inlineElement("p", lines.slice(at, end).join("\n").trim(), depth));
      at = end;
    }
  }
  return made;
}

function structured(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return codeBlock(lines, at);
  const heading = HEADING.exec(line);
  if (heading) {
    const level = Math.min(heading[1].length + 2, 6); // the page itself has h1 and h2
    return { made: inlineElement(`h${level}`, heading[2].trim(), depth), end: at + 1 };
  }
  if (RULE.test(line)) return { made: element("hr"), end: at + 1 };
  if (QUOTE.test(line)) return quote(lines, at, depth);
  if (ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at, depth);
  return null;
}

function endOfParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim()) {
    const line = lines[end];
    const starts = [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
    if (depth < MAX_DEPTH && (starts || isTable(lines, end))) break;
    end += 1;
  }
  return end;
}

function codeBlock(lines, at) {
  const [opening, fence, language] = FENCE.exec(lines[at]);
  const indent = opening.indexOf(fence[0]);
  let end = at + 1;
  while (end < lines.length && nextFence(fence, lines[end]) !== null) end += 1;
  const code = lines.slice(at + 1, end).map((line) => withoutIndent(line, indent));
  const made = element("pre");
  made.append(element("code", "", code.join("\n")));
  if (language) made.dataset.language = language;
  return { made, end: end + 1 };
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const made = element("blockquote");
  made.append(...blocks(lines.slice(at, end).map((line) => QUOTE.exec(line)[1]), depth + 1));
  return { made, end };
}

// Items of one indentation; what is indented deeper belongs to the item above it.
function list(lines, at, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(marker);
  const made = element(ordered ? "ol" : "ul");
  if (ordered) made.start = Number.parseInt(marker, 10);
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > indent.length || /\d/.test(item[2]) !== ordered) break;
    const inner = [item[3]];
    let fence = nextFence(null, item[3]);
    end += 1;
    while (end < lines.length && (fence || isDeeper(lines[end], indent.length))) {
      inner.push(withoutIndent(lines[end], item[0].length - item[3].length));
      fence = nextFence(fence, lines[end]);
      end += 1;
    }
    made.append(listItem(inner, depth + 1));
    if (end < lines.length && (ITEM.exec(lines[end])?.[1].length ?? 0) < indent.length) break;
  }
  return { made, end };
}

function listItem(lines, depth) {
  const item = element("li");
  const [first, ...rest] = blocks(lines, depth);
  if (first) item.append(...(first.tagName === "P" ? first.childNodes : [first]), ...rest);
  return item;
}

function isDeeper(line, indent) {
  return line.trim() !== "" && line.length - line.trimStart().length > indent;
}

function withoutIndent(line, most) {
  const own = line.length - line.trimStart().length;
  return line.slice(Math.min(own, most));
}

function cells(line) {
  const parts = line.trim().replace(/\\\|/g, "\u0000").split("|");
  if (parts.length > 1 && !parts[0].trim()) parts.shift();
  if (parts.length > 1 && !parts[parts.length - 1].trim()) parts.pop();
  return parts.map((part) => part.replaceAll("\u0000", "|").trim());
}

function isTable(lines, at) {
  const next = lines[at + 1];
  if (!lines[at].includes("|") || next === undefined || !next.includes("-")) return false;
  const marks = cells(next);
  return marks.every((mark) => /^:?-+:?$/.test(mark)) && marks.length === cells(lines[at]).length;
}

function table(lines, at, depth) {
  const head = cells(lines[at]);
  const right = cells(lines[at + 1]).map((mark) => /^-+:$/.test(mark));
  const row = (tag, texts) => {
    const made = element("tr");
    made.append(
      ...head.map((_, i) => {
        const cell = inlineElement(tag, texts[i] ?? "", depth);
        if (right[i]) cell.className = "number";
        return cell;
      }),
    );
    return made;
  };
  const [top, body, made] = [element("thead"), element("tbody"), element("table")];
  top.append(row("th", head));
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end += 1) {
    body.append(row("td", cells(lines[end])));
  }
  made.append(top, body);
  return { made, end };
}

function inlineElement(tag, text, depth) {
  const made = element(tag);
  made.append(...inline(text, depth));
  return made;
}

// Nodes of a paragraph's text: strings become text nodes when they are appended.
function inline(text, depth, inLink = false) {
  if (depth >= MAX_DEPTH) return [text];
  const nodes = [];
  let last = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(text.slice(last, found.index), span(found, depth, inLink));
    last = found.index + found[0].length;
  }
  nodes.push(text.slice(last));
  return nodes.filter((node) => node !== "");
}

function span(found, depth, inLink) {
  const [whole, escaped, code2, code1, label, address, bold, bold2, italic, italic2, gone] = found;
  const nested = (tag, text) => {
    const made = element(tag);
    made.append(...inline(text, depth + 1, inLink));
    return made;
  };
  if (escaped !== undefined) return escaped;
  const code = code2 ?? code1;
  if (code !== undefined) return element("code", "", code.replaceAll("\n", " "));
  if (address !== undefined) return (inLink ? null : link(address, label, depth)) ?? whole;
  if (/^https?:/.test(whole)) return inLink ? whole : bareLink(whole);
  if (bold ?? bold2) return nested("strong", bold ?? bold2);
  if (italic ?? italic2) return nested("em", italic ?? italic2);
  return nested("del", gone);
}

// Full stops and the like after an address belong to the sentence.
function bareLink(text) {
  let end = text.length;
  while (".,;:!?".includes(text[end - 1])) end -= 1;
  const address = text.slice(0, end);
  const made = document.createDocumentFragment();
  made.append(link(address, address, MAX_DEPTH) ?? address, text.slice(end));
  return made;
}

function link(address, label, depth) {
  const parsed = URL.canParse(address) ? new URL(address) : null;
  if (parsed === null || !["http:", "https:"].includes(parsed.protocol)) return null;
  const made = element("a");
  made.append(...inline(label || address, depth + 1, true));
  made.href = made.title = parsed.href;
  made.rel = "noopener noreferrer nofollow";
  made.target = "_blank";
  return made;
}
