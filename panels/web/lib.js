// window.h3, first part: DOM, REST, words for numbers, what a page remembers. Text is textContent.
window.h3 = (() => {
  let skew = 0; // milliseconds that the console's clock is ahead of this one

  function make(tag, cls, text, ...children) {
    const node = document.createElement(tag);
    if (cls) node.className = cls;
    if (text !== undefined && text !== null && text !== '') node.textContent = text;
    node.append(...children);
    return node;
  }

  // A button whose visible text may be a sign; `label` is what it does, in words.
  function button(cls, text, label, act) {
    const node = make('button', cls, text);
    node.type = 'button';
    if (label) { node.title = label; node.setAttribute('aria-label', label); }
    if (act) node.addEventListener('click', act);
    return node;
  }

  // Puts text into a node only when it differs, so that selections and screen readers stay calm.
  function write(node, text) {
    const words = text === null || text === undefined ? '' : String(text);
    if (node.textContent !== words) node.textContent = words;
  }

  function detail(answer, status) {
    const said = answer && answer.detail;
    if (typeof said === 'string') return said;
    if (Array.isArray(said) && said.length) return said.map((e) => `${(e.loc || []).slice(1).join('.')}: ${e.msg}`).join('; ');
    return `the console answered ${status}; try again`;
  }

  // JSON of /api/v1<path>; an Error with one sentence when it was refused or not reached.
  async function api(path, { method = 'GET', body, signal } = {}) {
    const options = { method, signal, headers: {} };
    if (body instanceof FormData) options.body = body;
    else if (body !== undefined) {
      options.body = JSON.stringify(body);
      options.headers['Content-Type'] = 'application/json';
    }
    let answer;
    try {
      answer = await fetch('/api/v1' + path, options);
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      throw new Error('the console cannot be reached; is it still running?');
    }
    if (answer.status === 401) location.reload(); // signed out elsewhere: the host shows its login
    const text = await answer.text();
    const json = /json/.test(answer.headers.get('Content-Type') || '') ? JSON.parse(text) : null;
    const date = Date.parse(answer.headers.get('Date')); // whole seconds of the console's clock
    if (isFinite(date)) skew = Math.abs(date - Date.now()) > 2500 ? date - Date.now() : 0;
    if (!answer.ok) throw Object.assign(new Error(detail(json, answer.status)), { status: answer.status });
    return json;
  }

  function seconds(x) {
    if (x === null || x === undefined || !isFinite(x)) return '–';
    if (x < 0.1) return (x * 1000).toFixed(1) + ' ms';
    if (x < 10) return x.toFixed(x < 1 ? 2 : 1) + ' s';
    if (x < 60) return Math.round(x) + ' s';
    const whole = Math.round(x), hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
    return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
  }

  function bytes(x) {
    if (x === null || x === undefined || !isFinite(x)) return '–';
    const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
    let i = 0, value = x;
    while (Math.abs(value) >= 1024 && i < units.length - 1) { value /= 1024; i += 1; }
    return (i && Math.abs(value) < 100 ? value.toFixed(1) : Math.round(value)) + ' ' + units[i];
  }

  // Seconds since the epoch by the console's clock.
  const now = () => (Date.now() + skew) / 1000;

  function when(epoch) {
    if (!epoch) return '–';
    const then = new Date(epoch * 1000), today = new Date();
    const time = then.toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });
    if (then.toDateString() === today.toDateString()) return time;
    const year = then.getFullYear() === today.getFullYear() ? undefined : 'numeric';
    return then.toLocaleDateString([], { day: 'numeric', month: 'short', year }) + ' ' + time;
  }

  // What this browser remembers; undefined when it remembers nothing (or may not).
  function state(key, value) {
    try {
      if (value === undefined) return JSON.parse(localStorage.getItem('h3:' + key)) ?? undefined;
      if (value === null) localStorage.removeItem('h3:' + key);
      else localStorage.setItem('h3:' + key, JSON.stringify(value));
    } catch (error) { /* storage is blocked, full or was edited by hand: the page works without */ }
    return value ?? undefined;
  }

  const alive = (element) => element.isConnected;
  const shown = (element) => !document.hidden && element.offsetParent !== null;

  // Calls fn every so often while the element is on the page, and only while it can be seen.
  function every(milliseconds, element, fn) {
    const timer = setInterval(() => {
      if (!alive(element)) clearInterval(timer);
      else if (shown(element)) fn();
    }, milliseconds);
    return () => clearInterval(timer);
  }

  function debounce(milliseconds, fn) {
    let timer = 0;
    return (...args) => { clearTimeout(timer); timer = setTimeout(() => fn(...args), milliseconds); };
  }

  return { make, button, write, api, seconds, bytes, now, when, state, alive, shown, every, debounce };
})();
