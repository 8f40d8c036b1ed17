// Files into references: our own mp4s give their settings back, others are uploaded one by one.
const OURS = 'h3_run', HEAD_BYTES = 4 << 20; // the key of our mp4s stands at the front (faststart)
const loads = element.querySelector('.loads');

async function isOurs(file) {
  if (!/\.mp4$/i.test(file.name)) return false;
  const head = await file.slice(0, HEAD_BYTES).text();
  return head.includes(OURS);
}

// One line under the list while a file travels; it stays, with the reason, when it was refused.
function line(file) {
  const item = h3.make('li', 'load'), name = h3.make('span', 'load-name', file.name), bar = h3.make('progress', 'load-bar');
  bar.max = 1;
  bar.value = 0;
  item.append(name, bar);
  loads.append(item);
  return {
    progress: (share) => { bar.value = share; },
    done: () => item.remove(),
    failed: (reason) => {
      item.className = 'load bad';
      const close = h3.button('ico', 'close', `Dismiss the message about ${file.name}`, () => item.remove());
      item.replaceChildren(h3.make('span', 'load-name', reason.includes(file.name) ? reason : `${file.name}: ${reason}`), close);
    },
  };
}

function send(file, onProgress) {
  return new Promise((done, failed) => {
    const request = new XMLHttpRequest(), body = new FormData(); // fetch tells nothing of an upload's progress
    body.append('file', file, file.name);
    request.open('POST', '/api/v1/media');
    request.responseType = 'json';
    request.upload.onprogress = (event) => onProgress(event.total ? event.loaded / event.total : 0);
    request.onerror = () => failed(new Error('it could not be sent; is the console still running?'));
    request.onload = () => {
      if (request.status < 300) done(request.response);
      else failed(new Error((request.response && typeof request.response.detail === 'string' && request.response.detail) || `the console answered ${request.status}`));
    };
    request.send(body);
  });
}

async function settings(file) {
  const body = new FormData();
  body.append('file', file, file.name);
  const found = await h3.api('/media/settings', { method: 'POST', body });
  const names = (h3.plans.get() || []).map((one) => one.name), plan = found.plan && found.plan.name;
  const missing = await h3.load(found.request, names.includes(plan) ? { plan } : {});
  h3.emit('restored', { file, missing });
}

// Uploads files and gives each Media to `add` in the order of the files; `plain` asks no mp4 for its settings.
async function upload(files, add, plain) {
  for (const file of files) {
    const row = line(file);
    try {
      if (!plain && await isOurs(file)) await settings(file);
      else add(await send(file, row.progress));
      row.done();
    } catch (error) {
      row.failed(error.message);
    }
  }
}
