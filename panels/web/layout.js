// Backends: asks once, again when a probe or a job has ended, and while the tab can be seen.
const q = (s) => element.querySelector(s);

function fail(text) {
  h3.write(q('.ly-alert'), text);
  q('.ly-alert').hidden = !text;
}

const machine = backendsView(element, fail), editor = editorView(element), pair = pairView(element, editor);

async function ask() {
  try {
    const found = await h3.api('/backends');
    machine.draw(found);
    editor.backends(found);
    pair.plans(h3.plans.get() || []);
  } catch (error) {
    fail(error.message);
  }
}

const soon = h3.debounce(150, ask);
h3.on('plans', (plans) => { editor.plans(plans); pair.plans(plans); }, element);
h3.on('backends', soon, element);
h3.on('reset', soon, element);
h3.on('job', (job) => { if (job.ended && h3.shown(element)) soon(); }, element);

// Plans may have been saved by somebody else since.
function look() {
  h3.plans.refresh().catch((error) => fail(error.message));
  soon();
}

h3.on('tab', ({ tab }) => { if (tab === 'layout') look(); }, element);
look();
