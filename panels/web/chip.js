// Header: the engine's state, as text only.
const dot = element.querySelector('.chip-dot'), text = element.querySelector('.chip-text');
function draw() {
  const v = props.value || {};
  dot.dataset.state = v.engine || 'loading';
  text.textContent = v.text || '';
}
watch('value', draw);
draw();
