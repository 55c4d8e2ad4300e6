// The built files go into the Python package, with the licences of what they contain, and the hash of their sources: a test compares the two.
import { createHash } from 'node:crypto';
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vite';

const OUT = '../src/transduce/studio/static';
const SOURCES = ['index.html', 'package.json', 'package-lock.json', 'vite.config.js'];

function sourceHash() {
  const inside = readdirSync('src', { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath, entry.name).replaceAll('\\', '/'));
  const hash = createHash('sha256');
  for (const name of [...SOURCES, ...inside].sort()) {
    hash.update(`${name}\0`);
    hash.update(readFileSync(name));
    hash.update('\0');
  }
  return hash.digest('hex');
}

/** The licence of a package, from its folder. */
function licence(name) {
  const folder = `node_modules/${name}`;
  const file = ['LICENSE', 'LICENSE.md', 'license'].map((one) => `${folder}/${one}`).find(existsSync);
  return `${name} ${JSON.parse(readFileSync(`${folder}/package.json`)).version}\n\n${readFileSync(file, 'utf8').trim()}\n`;
}

const recordLicences = {
  name: 'record-licences',
  generateBundle(_, bundle) {
    const modules = Object.values(bundle).flatMap((one) => Object.keys(one.modules ?? {}));
    const names = new Set(modules.map((id) => id.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1]).filter(Boolean));
    this.emitFile({ type: 'asset', fileName: 'licences.txt', source: [...names].sort().map(licence).join(`\n${'-'.repeat(80)}\n\n`) });
  },
};

const recordSources = {
  name: 'record-sources',
  closeBundle() {
    writeFileSync(`${OUT}/sources.sha256`, `${sourceHash()}\n`);
  },
};

export default defineConfig({
  base: './',
  plugins: [svelte({ compilerOptions: { css: 'external' } }), recordLicences, recordSources],
  build: {
    outDir: OUT,
    emptyOutDir: true,
    modulePreload: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: {
        entryFileNames: 'studio.js',
        assetFileNames: 'studio[extname]',
        codeSplitting: false,
      },
    },
  },
});
