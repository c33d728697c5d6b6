"use strict";
// Pages work without this script. It replaces parts of a page without loading the whole page:
// - an element with data-refresh (an address) and data-every (seconds) is kept up to date;
// - the slider with data-part shows the state at the version that it points to.

const away = document.getElementById("away");
// How long an answer may take: a part that is kept fresh is answered within 3 s, also when a server
// does not answer; an old version may have to be looked up in the archive.
const REFRESH_MS = 15_000;
const VERSION_MS = 120_000;

function tellAway(message) {
  if (away.textContent !== message) away.textContent = message;
  away.hidden = message === "";
}

// The HTML of a part; null: the server did not answer. A whole page of the console, such as the one
// that asks for a token, is loaded in place of this one. What has no mark of the console comes from
// something before the server, which does not reach it. Throws when the caller stops it.
async function fetchPart(address, limit_ms, stop = new AbortController().signal) {
  const signal = AbortSignal.any([stop, AbortSignal.timeout(limit_ms)]);
  try {
    const answer = await fetch(address, { signal, headers: { Accept: "text/html" }, credentials: "same-origin" });
    const made = answer.headers.get("Everstate-Console");
    if (made === "page") {
      window.location.reload();
      return new Promise(() => {});
    }
    return made === "part" ? await answer.text() : null;
  } catch (error) {
    if (stop.aborted) throw error;
    return null;
  }
}

// Replaces what is inside an element; the keyboard's focus stays, and what was unfolded.
function replace(element, html) {
  const focused = element.contains(document.activeElement) ? document.activeElement : null;
  const mark = focused && (focused.getAttribute("href") || focused.getAttribute("aria-label"));
  const unfolded = [...element.querySelectorAll("details[open][id]")].map((each) => each.id);
  element.innerHTML = html;
  for (const id of unfolded) document.getElementById(id)?.setAttribute("open", "");
  if (!mark) return;
  for (const each of element.querySelectorAll("a[href], [tabindex]")) {
    if (each.getAttribute("href") === mark || each.getAttribute("aria-label") === mark) {
      each.focus({ preventScroll: true });
      return;
    }
  }
}

function keepFresh(element) {
  const usual_ms = Number(element.dataset.every) * 1000;
  const pause_ms = () => (element.querySelector("[data-loading]") ? 1000 : usual_ms);
  let shown = "";
  async function look() {
    try {
      if (!document.hidden) await refresh();
    } finally {
      window.setTimeout(look, pause_ms());
    }
  }
  async function refresh() {
    const html = await fetchPart(element.dataset.refresh, REFRESH_MS);
    if (html === null) {
      const time = new Date().toLocaleTimeString();
      tellAway(`everstate serve does not answer (${time}). What is below is older; the page tries again.`);
    } else {
      tellAway("");
      if (html !== shown) replace(element, html);
      shown = html;
    }
  }
  window.setTimeout(look, pause_ms());
}

function slide(input) {
  const part = document.getElementById(input.dataset.part);
  const chosen = document.getElementById("chosen");
  let running = null;
  let timer = 0;
  async function show() {
    if (running) running.abort();
    const mine = new AbortController();
    running = mine;
    const page = new URL(input.form.action);
    page.searchParams.set("version", input.value);
    const address = new URL(page);
    address.searchParams.set("part", "1");
    part.setAttribute("aria-busy", "true");
    try {
      const html = await fetchPart(address, VERSION_MS, mine.signal);
      tellAway(html === null ? "everstate serve does not answer. Move the slider again in a while." : "");
      if (html !== null) {
        replace(part, html);
        window.history.replaceState(null, "", page);
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      throw error;
    }
    part.removeAttribute("aria-busy");
  }
  input.addEventListener("input", () => {
    chosen.value = input.value;
    window.clearTimeout(timer);
    timer = window.setTimeout(show, 80);
  });
}

document.querySelectorAll("[data-refresh]").forEach(keepFresh);
document.querySelectorAll("input[type=range][data-part]").forEach(slide);
