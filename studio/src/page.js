// Content of a page without a server: the answers of a saved view, or explanations. null: there is a server.
const content = document.getElementById('page');

export const page = content === null ? null : JSON.parse(content.textContent);
export const offline = page !== null;
/** Whether the page was written by `explain --html` or shows an explanation in a notebook. */
export const explained = Boolean(page?.explanations);
