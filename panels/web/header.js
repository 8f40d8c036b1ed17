// The header: tabs, the engine's state, who is signed in, theme, and the line of a lost connection.
const q = (s) => element.querySelector(s);
const nav = q('.h3tabs'), dot = q('.chip-dot'), words = q('.chip-text'), lost = q('.offline');
const STATES = { loading: 'loading', ready: 'ready', busy: 'working', failed: 'stopped', closed: 'closed', unloaded: 'not loaded' };

const tabs = props.value.tabs.map(({ name, title }) => {
  const tab = h3.button('tab', title, '', () => h3.go(name));
  tab.setAttribute('role', 'tab');
  tab.dataset.tab = name;
  return tab;
});
nav.replaceChildren(...tabs);

function mark({ tab }) {
  for (const node of tabs) {
    const open = node.dataset.tab === tab;
    node.setAttribute('aria-selected', open);
    node.tabIndex = open ? 0 : -1;
    if (open) nav.scrollTo({ left: node.offsetLeft - (nav.clientWidth - node.offsetWidth) / 2 });
  }
}

nav.addEventListener('keydown', (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
  next.focus();
  h3.go(next.dataset.tab);
});

function engine({ engine }) {
  if (!engine) return;
  dot.dataset.state = engine.state;
  const parts = [engine.plan, STATES[engine.state] || engine.state];
  if (engine.state === 'loading' && engine.total) parts.push(`${engine.stage} ${Math.floor(100 * engine.done / engine.total)} %`);
  h3.write(words, parts.filter(Boolean).join(' · '));
  q('.chip').title = engine.reason || '';
}

async function who() {
  const session = await h3.api('/session');
  h3.session = session;
  h3.emit('session', session);
  q('.who').hidden = !session.locked;
  h3.write(q('.who-name'), session.user);
}

async function shared() {
  const { share } = await h3.api('/health');
  const node = q('.share');
  node.hidden = share.state === 'off';
  h3.write(node, { up: 'Shared link', starting: 'Asking for a link…', failed: 'No shared link' }[share.state] || share.state);
  node.title = share.reason || share.url;
  if (share.url) node.href = share.url; else node.removeAttribute('href');
}

// Who and where from; a console that does not answer is told by the line above.
const ask = () => Promise.all([who(), shared()]).catch((error) => h3.emit('trouble', error.message));

function lights() {
  const dark = h3.dark();
  q('.theme').replaceChildren(h3.icon(dark ? 'sun' : 'moon'));
  q('.theme').setAttribute('aria-label', dark ? 'Light theme' : 'Dark theme');
  q('.theme').title = dark ? 'Light theme' : 'Dark theme';
  const on = h3.notifying();
  q('.bell').setAttribute('aria-pressed', on);
  q('.bell').title = on ? 'Notifications are on' : 'Notify me when a job ends';
}

q('.theme').addEventListener('click', h3.toggleTheme);
q('.bell').addEventListener('click', async () => { await h3.notify(!h3.notifying()); lights(); });
q('.out').addEventListener('click', async () => { await fetch('/logout', { method: 'POST' }); location.assign('/'); });
q('.bell').hidden = !('Notification' in window);
h3.on('tab', mark, element);
h3.on('jobs', engine, element);
h3.on('theme', lights, element);
h3.on('online', (now) => { lost.hidden = now; if (now) { h3.jobs.refresh(); ask(); } }, element);
h3.on('share', ask, element);
h3.draft.start(props.value.first);
h3.startTheme();
lights();
h3.tabs(props.value.tabs.map((tab) => tab.name));
h3.connect();
h3.jobs.refresh();
ask();
