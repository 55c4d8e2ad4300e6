// Table of the views. A file in views/ describes itself in `export const view`:
//   id        its name in addresses
//   title     its name in the navigation
//   group     the heading it stands under: see GROUPS
//   order     its place in the navigation
//   summary   one sentence under the title
//   recorded  true: a page written by `explain --html` has what the view needs
//   fits      run => true, or a sentence that says why it does not fit this run
//   component is the default export: it receives `run` (see /api/runs) and `runs`

const files = import.meta.glob('./views/*.svelte', { eager: true });

export const GROUPS = ['Attention', 'Output', 'Inside', 'Trust', 'Runs'];

export const VIEWS = Object.values(files)
  .filter((file) => file.view)
  .map((file) => ({ fits: () => true, ...file.view, component: file.default }))
  .sort((a, b) => a.order - b.order);

export function findView(id) {
  return VIEWS.find((view) => view.id === id);
}
