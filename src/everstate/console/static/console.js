"use strict";
// Pages work without this script. It replaces parts of a page without loading the whole page:
// - an element with data-refresh (an address) and data-every (seconds) is kept up to date;
// - the slider with data-part shows the state at the version that it points to.

const away = document.getElementById("away");

function tellAway(message) {
  if (away.textContent !== message) away.textContent = message;
  away.hidden = message === "";
}

// The HTML of a part; null: the server did not answer. Anything but a part loads the page again.
async function fetchPart(address, signal) {
  let answer;
  try {
    answer = await fetch(address, { signal, headers: { Accept: "text/html" }, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return null;
  }
  if (answer.status === 401) {
    window.location.reload();
    return null;
  }
  return answer.text();
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
    if (!document.hidden) {
      const html = await fetchPart(element.dataset.refresh);
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
  window.setTimeout(look, pause_ms());
}

function slide(input) {
  const part = document.getElementById(input.dataset.part);
  const chosen = document.getElementById("chosen");
  let running = null;
  let timer = 0;
  async function show() {
    if (running) running.abort();
    running = new AbortController();
    const page = new URL(input.form.action);
    page.searchParams.set("version", input.value);
    const address = new URL(page);
    address.searchParams.set("part", "1");
    part.setAttribute("aria-busy", "true");
    try {
      const html = await fetchPart(address, running.signal);
      tellAway(html === null ? "everstate serve does not answer. Move the slider again in a while." : "");
      if (html !== null) {
        replace(part, html);
        window.history.replaceState(null, "", page);
      }
    } catch (error) {
      if (error.name === "AbortError") return;
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
