// Ordered references: thumbnail, tag, facts, and buttons. Every text goes in by textContent.
const list = element.querySelector('.strip'), empty = element.querySelector('.strip-empty');
function make(tag, cls, text) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text) node.textContent = text;
  return node;
}
function button(label, text, act, index, off) {
  const node = make('button', 'ico', text);
  node.type = 'button';
  node.title = label;
  node.setAttribute('aria-label', label);
  node.disabled = !!off;
  node.dataset.act = act;
  node.dataset.index = index;
  return node;
}
function thumb(item) {
  const box = make('div', 'thumb');
  if (item.kind === 'image') {
    const img = make('img');
    img.src = item.url;
    img.alt = '';
    box.append(img);
  } else if (item.kind === 'video') {
    const video = make('video');
    video.src = item.url;
    video.muted = true;
    video.preload = 'metadata';
    box.append(video);
  } else {
    box.textContent = '♪';
  }
  return box;
}
function row(item, index, total) {
  const li = make('li', 'ref');
  const words = make('div', 'ref-words');
  const tag = make('button', 'tag', item.tag);
  tag.type = 'button';
  tag.title = 'Insert ' + item.tag + ' into the prompt';
  tag.dataset.tag = item.tag;
  const head = make('div', 'ref-head');
  head.append(tag, make('span', 'ref-name', item.name));
  words.append(head, make('div', 'ref-facts', item.facts));
  const tools = make('div', 'ref-tools');
  if (item.kind === 'video' && item.sound) {
    const sound = button(item.mute ? 'Use its sound' : 'Leave its sound out', item.mute ? 'sound off' : 'sound on', 'mute', index);
    sound.classList.add('wide');
    tools.append(sound);
  }
  tools.append(
    button('Move up', '↑', 'up', index, index === 0),
    button('Move down', '↓', 'down', index, index === total - 1),
    button('Remove', '×', 'remove', index));
  li.append(thumb(item), words, tools);
  return li;
}
function draw() {
  const items = (props.value && props.value.items) || [];
  list.replaceChildren(...items.map((item, i) => row(item, i, items.length)));
  empty.hidden = items.length > 0;
}
function insert(tag) {
  const area = document.querySelector('#prompt textarea');
  const at = area.selectionStart, before = area.value.slice(0, at), after = area.value.slice(area.selectionEnd);
  const left = before && !/\s$/.test(before) ? ' ' : '', right = after && !/^\s/.test(after) ? ' ' : '';
  area.setRangeText(left + tag + right, at, area.selectionEnd, 'end');
  area.dispatchEvent(new Event('input', { bubbles: true }));
  area.focus();
}
element.addEventListener('click', (event) => {
  const node = event.target.closest('button');
  if (!node) return;
  if (node.dataset.tag) insert(node.dataset.tag);
  if (node.dataset.act) trigger('apply', { act: node.dataset.act, index: Number(node.dataset.index) });
});
watch('value', draw);
draw();
