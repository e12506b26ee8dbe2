"use strict";
const data = JSON.parse(document.getElementById("content").textContent);
const FOLD = 600; // characters of a text that are shown until it is unfolded
const collapsed = new Set();
const unfolded = new Set();
// Of a validation, which trains nothing, the response mask says what training would train.
const trained = data.is_training ? "trained" : "trainable";
let query = "";
let leafRow = -1;

const byId = (id) => document.getElementById(id);
const number = (value) => value.toLocaleString("en-US");
const measured = (value) => (value === null ? "–" : value.toLocaleString("en-US", { maximumSignificantDigits: 3 }));
const plural = (count, word) => `${number(count)} ${count === 1 ? word : word === "leaf" ? "leaves" : word + "s"}`;

// An element with its text. Text is never parsed: what a model wrote stays text.
function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Orange over grey to blue, for -1..1: told apart with every common colour vision.
function colour(place) {
  const ends = place < 0 ? [213, 94, 0] : [0, 114, 178];
  const mix = ends.map((end) => Math.round(190 + (end - 190) * Math.min(1, Math.abs(place))));
  return `rgb(${mix.join(",")})`;
}

function colourOf(value, range) {
  if (value === null || range === null) return "transparent";
  const [low, high] = range;
  return colour(high > low ? (2 * (value - low)) / (high - low) - 1 : 0);
}

// The colours of roles: of Okabe and Ito, told apart with every common colour vision, and any hues beyond those.
const ROLES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#8c8c8c"];
function colourOfRole(role) {
  const place = data.roles.indexOf(role);
  return place < 0 ? "transparent" : ROLES[place] ?? `hsl(${(place * 137) % 360} 60% 45%)`;
}

function roleMark(role) {
  const made = element("span", "role");
  const swatch = element("i", "swatch");
  swatch.style.background = colourOfRole(role);
  made.append(swatch, role ?? "–");
  return made;
}

// The colour of a node by the role of its leaves, if they have one.
function colourOfRoles(rows) {
  const roles = new Set(rows.map((row) => data.leaves[row].role));
  return roles.size === 1 ? colourOfRole(...roles) : "transparent";
}

function measure(label, value, range) {
  const made = element("span", "measure");
  const swatch = element("i", "swatch");
  swatch.style.background = colourOf(value, range);
  made.append(swatch, `${label} ${measured(value)}`);
  return made;
}

function drawHeader() {
  document.title = `Token tree ${data.uid}, step ${data.step}`;
  byId("uid").textContent = data.uid;
  byId("not-trained").textContent = `model, not ${trained}`;
  const facts = {
    step: number(data.step), sessions: number(data.num_sessions), leaves: number(data.leaves.length),
    "flat tokens": number(data.num_flat_tokens), "tree tokens": number(data.num_tree_tokens),
    POR: data.por.toFixed(3), nodes: number(data.nodes.length),
  };
  for (const [name, value] of Object.entries(facts)) {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "", value));
    byId("facts").append(pair);
  }
}

function drawRoles() {
  if (data.roles.length) byId("colour").append(element("option", "", "role"));
  byId("roles").append(...data.roles.map(roleMark));
}

function line(cells, tag) {
  const made = element("tr");
  for (const cell of cells) {
    const box = element(tag, typeof cell === "object" && cell.wide ? "text" : "");
    box.append(typeof cell === "object" && cell.wide ? cell.wide : cell);
    made.append(box);
  }
  return made;
}

function drawLeaves() {
  const hasInfo = data.leaves.some((leaf) => Object.keys(leaf.info).length);
  const hasRoles = data.roles.length > 0;
  byId("leaves").append(line(["session_leaf", ...(hasRoles ? ["role"] : []), "tokens", trained, "reward", "advantage", hasInfo ? { wide: "reward info" } : ""], "th"));
  data.leaves.forEach((leaf, row) => {
    const show = element("button", "", leaf.name);
    show.type = "button";
    show.title = "Show only the path of this leaf";
    show.addEventListener("click", () => { byId("leaf").value = leaf.name; update(); byId(`node-${leaf.node}`).scrollIntoView(); });
    const info = Object.entries(leaf.info).map(([name, value]) => `${name}: ${value}`).join(", ");
    const advantage = leaf.advantage === null && data.advantage_range !== null && leaf.num_trained ? "varies" : measure("", leaf.advantage, data.advantage_range);
    byId("leaves").append(line([show, ...(hasRoles ? [roleMark(leaf.role)] : []), number(leaf.num_tokens), number(leaf.num_trained),
      measure("", leaf.reward, data.reward_range), advantage, hasInfo ? { wide: info || "–" } : ""], "td"));
    byId("leaf").append(element("option", "", leaf.name));
  });
  byId("leaf-section").open = data.leaves.length <= 8;
}

function drawOverlap() {
  const most = Math.max(...data.overlap.map(([, count]) => count));
  byId("overlap").append(line(["leaves", "", "tokens", "computed flat"], "th"));
  for (const [leaves, count] of data.overlap) {
    const bar = element("span", "bar");
    bar.style.width = `${(100 * count) / most}%`;
    byId("overlap").append(line([number(leaves), bar, number(count), number(leaves * count)], "td"));
  }
  byId("overlap-section").open = data.overlap.length <= 8;
}

// The text with what is searched for marked; long texts are folded around the first match.
function fillText(box, text, key) {
  box.replaceChildren();
  const found = query ? text.toLowerCase().indexOf(query) : -1;
  const isFolded = text.length > FOLD && !unfolded.has(key);
  const start = isFolded && found > FOLD / 2 ? found - FOLD / 2 : 0;
  const shown = isFolded ? text.slice(start, start + FOLD) : text;
  if (start) box.append("… ");
  let from = 0;
  const lower = shown.toLowerCase();
  // Lower case may have another length ("İ"): then nothing is marked, since places would not agree.
  for (let at = query && lower.length === shown.length ? lower.indexOf(query) : -1; at >= 0; at = lower.indexOf(query, from)) {
    box.append(shown.slice(from, at), element("mark", "", shown.slice(at, at + query.length)));
    from = at + query.length;
  }
  box.append(shown.slice(from), start + shown.length < text.length ? " …" : "");
}

function drawPassage(passage, numLeaves, key) {
  const isUntrained = passage.who === "model" && !passage.num_training;
  const kinds = [passage.who, ...(isUntrained ? ["untrained"] : []), ...(passage.continues ? ["continues"] : []), ...(passage.image === null ? [] : ["image"])];
  const made = element("div", `passage ${kinds.join(" ")}`);
  const parts = [passage.who];
  if (passage.call !== null) parts.push(`session ${passage.session} call ${passage.call} (${passage.kind})`);
  const isUsual = !data.is_training && passage.num_training === numLeaves;
  if (passage.who === "model" && !isUsual) parts.push(passage.num_training === numLeaves ? trained : passage.num_training ? `${trained} on ${passage.num_training} of ${plural(numLeaves, "leaf")}` : `not ${trained}`);
  parts.push(plural(passage.num_tokens, "token"));
  if (passage.turn_reward !== null) parts.push(`turn reward ${measured(passage.turn_reward)}${passage.num_rewarded === numLeaves ? "" : ` on ${passage.num_rewarded} of ${plural(numLeaves, "leaf")}`}`);
  const text = element("pre");
  if (!passage.continues) made.append(element("div", "who", parts.join(" · ")));
  const thumbnail = passage.image === null ? null : data.images[passage.image];
  if (thumbnail !== null) {
    const image = element("img");
    image.src = thumbnail;
    image.alt = "";
    made.append(image);
  }
  made.append(text);
  fillText(text, passage.text, key);
  if (passage.text.length > FOLD) {
    const more = element("button", "more", `Show all ${number(passage.text.length)} characters`);
    more.type = "button";
    more.setAttribute("aria-expanded", "false");
    more.addEventListener("click", () => {
      const isOpen = !unfolded.delete(key);
      if (isOpen) unfolded.add(key);
      more.textContent = isOpen ? "Show less" : `Show all ${number(passage.text.length)} characters`;
      more.setAttribute("aria-expanded", String(isOpen));
      fillText(text, passage.text, key);
    });
    made.append(more);
  }
  return made;
}

const REASONS = {
  sampled: "sampled: the model went on differently", read: "read something else", fork: "fork: another text read from the same place",
  continuation: "continued with another text", rewrite: "rewrite: earlier text was changed",
  drift: "drift: the same text in other tokens", root: "another start",
};

function drawNode(node, index) {
  const made = element("li", "node");
  made.id = `node-${index}`;
  made.style.setProperty("--level", node.level);
  const head = element("div", "head");
  if (data.nodes.some((other) => other.parent === index)) {
    const toggle = element("button", "toggle", "▾");
    toggle.type = "button";
    toggle.addEventListener("click", () => { if (!collapsed.delete(index)) collapsed.add(index); update(); });
    head.append(toggle);
  }
  const place = node.parent < 0 ? "root" : node.num_branches > 1 ? `branch ${node.branch} of ${node.num_branches}` : "goes on";
  head.append(element("span", "", `#${index}`), element("b", "", place));
  if (node.parent >= 0) head.append(element("span", "", `after #${node.parent}`));
  if (node.num_branches > 1) head.append(element("span", "fork", REASONS[node.fork] ?? node.fork));
  const mean = node.rows.length > 1 ? "mean " : "";
  head.append(element("span", "", `${plural(node.num_tokens, "token")} from position ${number(node.start)}`),
    element("span", "", `in ${plural(node.rows.length, "leaf")}`),
    measure(`${mean}reward`, node.reward, data.reward_range), measure(`${mean}advantage`, node.advantage, data.advantage_range));
  made.append(head);
  node.passages.forEach((passage, place) => made.append(drawPassage(passage, node.rows.length, `${index}/${place}`)));
  for (const row of node.ends) {
    const leaf = data.leaves[row];
    const end = element("div", "end");
    if (leaf.role !== null) end.append(roleMark(leaf.role), " ");
    made.append(end);
    end.append(`■ leaf ${leaf.name} ends: reward ${measured(leaf.reward)}, advantage ${leaf.advantage === null && data.advantage_range !== null && leaf.num_trained ? "varies" : measured(leaf.advantage)}`);
  }
  return made;
}

// Which nodes are shown: those on the chosen path, with a match or on the way to one. Only a search opens collapsed nodes.
function visibility() {
  const isHit = data.nodes.map((node) => (leafRow < 0 || node.rows.includes(leafRow)) &&
    (!query || node.passages.some((passage) => passage.text.toLowerCase().includes(query))));
  const isWanted = [...isHit];
  for (let index = data.nodes.length - 1; index >= 0; index--) {
    if (isWanted[index] && data.nodes[index].parent >= 0) isWanted[data.nodes[index].parent] = true;
  }
  const isOpen = [];
  data.nodes.forEach((node, index) => {
    isOpen[index] = node.parent < 0 || (isOpen[node.parent] && !collapsed.has(node.parent));
  });
  return { isHit, isShown: isWanted.map((wanted, index) => wanted && (query !== "" || isOpen[index])) };
}

function update() {
  query = byId("search").value.toLowerCase();
  leafRow = data.leaves.findIndex((leaf) => leaf.name === byId("leaf").value);
  const { isHit, isShown } = visibility();
  const by = byId("colour").value;
  const range = by === "reward" ? data.reward_range : data.advantage_range;
  data.nodes.forEach((node, index) => {
    const block = blocks[index];
    block.hidden = !isShown[index];
    block.classList.toggle("context", query !== "" && !isHit[index]);
    block.style.borderLeftColor = by === "role" ? colourOfRoles(node.rows) : colourOf(node[by], range);
    const toggle = block.querySelector(".toggle");
    if (toggle) {
      toggle.textContent = collapsed.has(index) ? "▸" : "▾";
      toggle.setAttribute("aria-expanded", String(!collapsed.has(index)));
      toggle.setAttribute("aria-label", `what follows node #${index}`);
    }
    block.querySelectorAll("pre").forEach((box, place) => {
      if (isShown[index]) fillText(box, node.passages[place].text, `${index}/${place}`);
    });
  });
  byId("scale").hidden = by === "role";
  byId("measure").textContent = by;
  byId("low").textContent = range ? measured(range[0]) : "–";
  byId("high").textContent = range ? measured(range[1]) : "–";
  byId("gradient").style.background = `linear-gradient(to right, ${colour(-1)}, ${colour(0)}, ${colour(1)})`;
  const num = isShown.filter(Boolean).length;
  byId("status").textContent = query ? `${plural(isHit.filter(Boolean).length, "node")} with “${byId("search").value}”`
    : num < data.nodes.length ? `${number(num)} of ${plural(data.nodes.length, "node")} shown` : "";
}

function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const id of ["search", "leaf", "colour"]) if (wanted.has(id)) byId(id).value = wanted.get(id);
  const folded = wanted.get("collapse");
  if (folded === "all") collapseAll();
  else if (folded) folded.split(",").forEach((index) => collapsed.add(Number(index)));
}

function collapseAll() {
  data.nodes.forEach((node) => { if (node.parent >= 0) collapsed.add(node.parent); });
}

drawHeader();
drawRoles();
drawLeaves();
drawOverlap();
const blocks = data.nodes.map(drawNode);
byId("tree").append(...blocks);
if (data.advantage_range === null) byId("colour").value = "reward";
readAddress();
update();
byId("search").addEventListener("input", update);
for (const id of ["leaf", "colour"]) byId(id).addEventListener("change", update);
byId("collapse").addEventListener("click", () => { collapseAll(); update(); });
byId("expand").addEventListener("click", () => { collapsed.clear(); update(); });
window.addEventListener("hashchange", () => { readAddress(); update(); });
