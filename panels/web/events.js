// h3.on and h3.emit: the page's one event stream, which resumes, and the page's own events.
(() => {
  const listeners = new Map(); // type -> Set of functions
  const HIDDEN_MILLISECONDS = 60000;
  const MOST_WAIT_MILLISECONDS = 10000;
  let source = null, last = '', before = false, wait = 500, online = true, asleep = 0;

  function emit(type, data) {
    for (const fn of [...(listeners.get(type) || [])]) fn(data);
  }

  // Calls fn(data) for every event of a type; returns a function that ends it. With an element it
  // ends by itself once the element has left the page.
  function on(type, fn, element) {
    const call = element ? (data) => (element.isConnected ? fn(data) : off()) : fn;
    const off = () => listeners.get(type).delete(call);
    if (!listeners.has(type)) {
      listeners.set(type, new Set());
      if (source) listen(source, type);
    }
    listeners.get(type).add(call);
    return off;
  }

  function listen(stream, type) {
    stream.addEventListener(type, (event) => {
      if (event.data === undefined) return; // the stream's own `error` and `open`
      if (event.lastEventId) last = event.lastEventId;
      emit(type, JSON.parse(event.data));
    });
  }

  function reach(now) {
    if (now === online) return;
    online = now;
    emit('online', now);
  }

  function open() {
    if (source) return;
    source = new EventSource('/api/v1/events' + (last ? '?last=' + encodeURIComponent(last) : ''));
    const stream = source;
    const blind = before && !last; // nothing had come yet by which to resume: what was missed is unknown
    before = true;
    stream.onopen = () => {
      wait = 500;
      reach(true);
      if (blind) emit('reset', {});
    };
    stream.onerror = () => {
      if (stream !== source) return;
      // The browser's own retry would repeat an old ?last=; ours asks from the newest id.
      close();
      reach(false);
      retry();
    };
    for (const type of listeners.keys()) listen(stream, type);
  }

  // Asks by REST first: that answer tells a dead console from a session that has ended.
  function retry() {
    setTimeout(() => {
      if (document.hidden && !h3.awake()) return;
      h3.api('/session').then(open, retry);
    }, wait);
    wait = Math.min(wait * 2, MOST_WAIT_MILLISECONDS);
  }

  function close() {
    if (source) source.close();
    source = null;
  }

  // A hidden page gives its connection back (a browser has six for all tabs), unless it was asked
  // to notify; the stream resumes where it stopped.
  document.addEventListener('visibilitychange', () => {
    clearTimeout(asleep);
    if (!document.hidden) open();
    else if (!h3.awake()) asleep = setTimeout(close, HIDDEN_MILLISECONDS);
  });
  addEventListener('pagehide', close);
  addEventListener('pageshow', (event) => { if (event.persisted) open(); });

  Object.assign(h3, { on, emit, connect: open, awake: () => false, online: () => online });
})();
