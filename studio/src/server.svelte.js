// Requests to the server, answers kept for this tab, and the state of the connection.
// A page without a server holds its answers itself.
import { explained, offline, page } from './page.js';
import { recordedAnswer } from './recorded.js';

export { offline };

const RETRY = 1500; // milliseconds between two attempts to reach the server
const KEPT = 100; // answers

export const connection = $state({ lost: false });

const answers = new Map(Object.entries(page?.answers ?? {}));
let waiting = null;

export class RequestError extends Error {
  constructor({ problem, where = '', remedy = '' }) {
    super(where ? `${where}: ${problem}` : problem);
    this.remedy = remedy;
  }
}

/** The path with its query, parameters in alphabetical order: one key for one answer. */
export function requestKey(path, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== '' && value !== null && value !== undefined);
  const sorted = kept.map(([name, value]) => [name, String(value)]).sort(([a], [b]) => (a < b ? -1 : 1));
  const query = new URLSearchParams(sorted).toString();
  return `/api/${path}${query ? `?${query}` : ''}`;
}

/** All answers that this tab has seen, for the export of a page. */
export function seenAnswers() {
  return Object.fromEntries(answers);
}

async function reach(key, options) {
  if (offline) throw new RequestError({ problem: 'this file does not contain it', remedy: 'open the studio' });
  for (;;) {
    try {
      const response = await fetch(`.${key}`, options);
      connection.lost = false;
      return response;
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      lose();
      await new Promise((resolve) => setTimeout(resolve, RETRY));
    }
  }
}

async function refused(response) {
  const content = await response.json().catch(() => ({ problem: `the server answered ${response.status}` }));
  if (Array.isArray(content.detail)) {
    return new RequestError({ problem: content.detail.map((one) => `${one.loc?.at(-1)}: ${one.msg}`).join('; ') });
  }
  return new RequestError(content.problem ? content : { problem: `the server answered ${response.status}` });
}

/** A JSON answer of the server. Waits for the server where it cannot be reached. */
export async function get(path, params = {}, { signal, fresh = false } = {}) {
  const key = requestKey(path, params);
  if (!fresh && answers.has(key)) return answers.get(key);
  const known = explained ? recordedAnswer(path, params) : null;
  if (known) {
    answers.set(key, known);
    return known;
  }
  const response = await reach(key, { signal });
  if (!response.ok) throw await refused(response);
  const content = await response.json();
  answers.set(key, content);
  if (answers.size > KEPT) answers.delete(answers.keys().next().value);
  return content;
}

/** Keeps an answer that came in parts, for the export of a page. */
export function keep(path, params, content) {
  answers.set(requestKey(path, params), content);
}

/** A binary answer: little-endian float32. */
export async function getFloats(path, params = {}, options = {}) {
  const response = await reach(requestKey(path, params), options);
  if (!response.ok) throw await refused(response);
  return new Float32Array(await response.arrayBuffer());
}

/** Sends JSON and returns the response. */
export async function post(path, content) {
  const response = await reach(`/api/${path}`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(content),
  });
  if (!response.ok) throw await refused(response);
  return response;
}

function lose() {
  connection.lost = true;
  waiting ??= setTimeout(async function attempt() {
    try {
      await fetch('./api/alive', { cache: 'no-store' });
      connection.lost = false;
      waiting = null;
    } catch {
      waiting = setTimeout(attempt, RETRY);
    }
  }, RETRY);
}

/** Asks now and then whether the server is there, so that its end is seen without a request. */
export function watch() {
  if (offline) return;
  setInterval(() => {
    if (!document.hidden && !connection.lost) fetch('./api/alive', { cache: 'no-store' }).catch(lose);
  }, 3000);
}
