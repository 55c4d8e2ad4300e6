// Light or dark: the choice of the system, or of the visitor.

const system = window.matchMedia('(prefers-color-scheme: dark)');

function chosen() {
  try {
    return localStorage.getItem('theme');
  } catch {
    return null; // a file opened from disk may have no storage
  }
}

export const theme = $state({ name: chosen() ?? (system.matches ? 'dark' : 'light') });

export function apply() {
  document.documentElement.dataset.theme = theme.name;
}

export function toggle() {
  theme.name = theme.name === 'dark' ? 'light' : 'dark';
  try {
    localStorage.setItem('theme', theme.name);
  } catch {
    // as above
  }
  apply();
}

system.addEventListener('change', (event) => {
  if (chosen() === null) {
    theme.name = event.matches ? 'dark' : 'light';
    apply();
  }
});
