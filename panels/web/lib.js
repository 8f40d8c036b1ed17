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

  const ICONS = {
    up: 'M12 19V5M6 11l6-6 6 6', down: 'M12 5v14M6 13l6 6 6-6', close: 'M6 6l12 12M18 6L6 18', edit: 'M4 20l1-4L16 5l3 3L8 19zM14 7l3 3',
    copy: 'M9 9h11v11H9zM15 9V4H4v11h5', dice: 'M4 4h16v16H4zM8.5 8.5h.01M15.5 8.5h.01M12 12h.01M8.5 15.5h.01M15.5 15.5h.01',
    swap: 'M4 8h15M15 4l4 4-4 4M20 16H5M9 12l-4 4 4 4', moon: 'M19 14.5A8 8 0 0 1 9.5 5 8 8 0 1 0 19 14.5z',
    sun: 'M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M5 19l1.4-1.4M17.6 6.4L19 5',
    sound: 'M5 9v6h4l5 4V5L9 9zM17 9a4 4 0 0 1 0 6', mute: 'M5 9v6h4l5 4V5L9 9zM17 9.5l5 5M22 9.5l-5 5', note: 'M9 18V5l10-2v13M9 18a3 3 0 1 1-3-3 3 3 0 0 1 3 3zM19 16a3 3 0 1 1-3-3 3 3 0 0 1 3 3z',
    video: 'M4 6h11v12H4zM15 10l5-3v10l-5-3', picture: 'M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4',
  };

  // A small drawing by its name, for buttons that have no room for words.
  function icon(name) {
    const space = 'http://www.w3.org/2000/svg', svg = document.createElementNS(space, 'svg'), path = document.createElementNS(space, 'path');
    svg.setAttribute('viewBox', '0 0 24 24');
    svg.setAttribute('class', 'icon');
    svg.setAttribute('aria-hidden', 'true');
    path.setAttribute('d', ICONS[name]);
    svg.append(path);
    return svg;
  }

  // A button of a text or an icon; `label` is what it does, in words.
  function button(cls, shown, label, act) {
    const node = shown in ICONS ? make('button', cls, '', icon(shown)) : make('button', cls, shown);
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
    const json = text && /json/.test(answer.headers.get('Content-Type') || '') ? JSON.parse(text) : null; // a 204 has no text
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

  // Calls fn once it was quiet for so long; under a steady stream after four times that.
  function debounce(milliseconds, fn) {
    let timer = 0, latest = 0;
    return (...args) => {
      const at = performance.now();
      clearTimeout(timer);
      latest ||= at + 4 * milliseconds;
      timer = setTimeout(() => { latest = 0; fn(...args); }, Math.max(0, Math.min(milliseconds, latest - at)));
    };
  }

  return { make, icon, button, write, api, seconds, bytes, now, when, state, alive, shown, every, debounce };
})();
