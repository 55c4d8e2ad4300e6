// State of a tab, which is its address: #/view?run=...&source=... A permalink restores it; two tabs share nothing.

import { offline, page } from './page.js';

// A saved page names the view that it was written from.
const first = page?.fragment ?? '';

function read(hash = location.hash || first) {
  const [path, query = ''] = hash.replace(/^#\/?/, '').split(/\?(.*)/s);
  return { view: decodeURIComponent(path), params: Object.fromEntries(new URLSearchParams(query)) };
}

export const address = $state(read());

/** The fragment of a view with its parameters; empty ones are left out. */
export function fragment(view, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== '' && value !== null && value !== undefined);
  const query = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return `#/${encodeURIComponent(view)}${query ? `?${query}` : ''}`;
}

// What a change of the view keeps: the model and the sentence.
const SHARED = ['run', 'source', 'target'];

/** Address of another view for the same run and input. */
export function linkTo(view, params = {}) {
  const shared = Object.fromEntries(SHARED.map((name) => [name, address.params[name]]));
  return fragment(view, { ...shared, ...params });
}

/** Opens a view: a new entry of the browser's history. */
export function open(view, params = {}) {
  visit(linkTo(view, params));
}

function visit(hash) {
  if (offline) Object.assign(address, read(hash)); // the frame of a notebook has no address of its own
  else location.hash = hash;
}

/** Changes parameters of this view in place. */
export function change(params) {
  const next = { ...address.params, ...params };
  for (const [name, value] of Object.entries(next)) {
    if (value === '' || value === null || value === undefined) delete next[name];
  }
  address.params = next;
  if (!offline) history.replaceState(null, '', fragment(address.view, next));
}

window.addEventListener('hashchange', () => Object.assign(address, read()));
if (offline) {
  document.addEventListener('click', (event) => {
    const link = event.target.closest?.('a[href^="#/"]');
    if (!link) return;
    event.preventDefault();
    visit(link.getAttribute('href'));
  });
}
