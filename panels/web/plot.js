// h3.plot: plotly.js, fetched when the first plot is drawn; zoom stays, colours are the theme's.
(() => {
  const drawn = new Map(); // div -> [traces, layout]
  let loading = null;

  function load() {
    loading ??= new Promise((done, failed) => {
      const script = document.createElement('script');
      script.src = '/assets/plotly.min.js';
      script.onload = () => done(window.Plotly);
      script.onerror = () => { loading = null; failed(new Error('the plot library could not be loaded; reload the page')); };
      document.head.append(script);
    });
    return loading;
  }

  const colour = (name) => getComputedStyle(document.body).getPropertyValue('--h3-' + name).trim();
  const palette = () => [1, 2, 3, 4, 5, 6, 7, 8].map((i) => colour('plot-' + i));

  function themed(layout) {
    const axis = { gridcolor: colour('line'), linecolor: colour('line'), zerolinecolor: colour('line'), automargin: true };
    const axes = {};
    for (const key of Object.keys(layout)) if (/^[xy]axis\d*$/.test(key)) axes[key] = { ...axis, ...layout[key] };
    return {
      uirevision: 'kept', autosize: true, colorway: palette(),
      paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
      margin: { l: 48, r: 12, t: 12, b: 36 }, xaxis: axis, yaxis: axis,
      modebar: { bgcolor: 'rgba(0,0,0,0)', color: colour('soft'), activecolor: colour('accent') },
      legend: { orientation: 'h', y: 1.02, yanchor: 'bottom', x: 0, font: { color: colour('soft') } },
      hoverlabel: { bgcolor: colour('card'), bordercolor: colour('line'), font: { color: colour('ink') } },
      ...layout, ...axes,
      font: { family: 'system-ui, sans-serif', size: 12, color: colour('soft'), ...(layout.font || {}) },
    };
  }

  async function plot(div, traces, layout = {}) {
    drawn.set(div, [traces, layout]);
    const Plotly = await load();
    if (!div.isConnected) { drawn.delete(div); return; }
    const [newest, shape] = drawn.get(div);
    await Plotly.react(div, newest, themed(shape), {
      responsive: true, displaylogo: false, displayModeBar: innerWidth < 600 ? false : 'hover', showSendToCloud: false, plotlyServerURL: '',
      modeBarButtonsToRemove: ['lasso2d', 'select2d', 'autoScale2d'],
    });
  }

  // Frees what a plot holds; call it before its div leaves the page for good.
  function unplot(div) {
    drawn.delete(div);
    if (window.Plotly) window.Plotly.purge(div);
  }

  h3.on('theme', () => {
    for (const [div, [traces, layout]] of drawn) {
      if (div.isConnected) plot(div, traces, layout);
      else unplot(div);
    }
  });

  Object.assign(h3, { plot, unplot, colour, palette });
})();
