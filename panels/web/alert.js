// One sentence under the button; hidden while there is none.
const box = element.querySelector('.alert');
function draw() {
  const text = (props.value && props.value.text) || '';
  box.textContent = text;
  box.hidden = !text;
}
watch('value', draw);
draw();
