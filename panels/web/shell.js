// Tabs kept in the URL hash (#timing or #timing/RUN), the theme, and notifications of ended jobs.
(() => {
  let names = [], here = { tab: '', id: '' };

  function parse(hash) {
    const [tab, id = '', other = ''] = hash.replace(/^#/, '').split('/').map(decodeURIComponent);
    if (tab === 'backends') return { tab: 'layout', id };
    if (tab === 'compare') return { tab: 'runs', id: id + '..' + other };
    return { tab: names.includes(tab) ? tab : names[0], id };
  }

  function open(place) {
    const moved = place.tab !== here.tab;
    here = place;
    if (moved) mount(place.tab, 200);
    h3.emit('tab', here);
  }

  // Gradio mounts a panel when its own tab button is clicked; that may not be there yet.
  function mount(tab, frames) {
    const button = document.getElementById(`tab-${tab}-button`);
    if (button) button.click();
    else if (frames && here.tab === tab) requestAnimationFrame(() => mount(tab, frames - 1));
  }

  // Opens a tab by name, with the id of a run where the panel shows one.
  function go(tab, id = '') {
    const hash = '#' + tab + (id ? '/' + encodeURIComponent(id) : '');
    if (location.hash === hash) h3.emit('tab', here);
    else location.hash = hash;
  }

  // The header calls this once, with the names of the tabs in order.
  function tabs(list) {
    names = list;
    here = { tab: names[0], id: '' };
    open(parse(location.hash));
    addEventListener('hashchange', () => open(parse(location.hash)));
  }

  const dark = () => document.body.classList.contains('dark');

  function theme(choice) {
    document.body.classList.toggle('dark', choice === 'dark');
    h3.emit('theme', choice);
  }

  function toggle() {
    const choice = dark() ? 'light' : 'dark';
    h3.state('theme', choice);
    theme(choice);
  }

  // ?__theme= of the address wins over what was chosen here, and that over the system.
  function startTheme() {
    const asked = new URLSearchParams(location.search).get('__theme');
    const chosen = asked || h3.state('theme');
    if (chosen === 'dark' || chosen === 'light') theme(chosen);
  }

  const notifying = () => h3.state('notify') === true && 'Notification' in window && Notification.permission === 'granted';

  async function notify(wanted) {
    if (wanted && 'Notification' in window) await Notification.requestPermission();
    h3.state('notify', wanted ? true : null);
    return notifying();
  }

  const ENDED = { done: 'is done', failed: 'failed', interrupted: 'was interrupted' };
  h3.on('job', (job) => {
    if (!notifying() || !job.mine || !ENDED[job.state] || !document.hidden) return;
    new Notification(`Job ${ENDED[job.state]}`, { body: job.reason || job.prompt || job.id, tag: job.id });
  });

  Object.assign(h3, { session: null, go, tabs, at: () => here, dark, toggleTheme: toggle, startTheme, notify, notifying, awake: notifying });
})();
