// The built files go into the Python package, with the hash of their sources: a test compares the two.
import { createHash } from 'node:crypto';
import { readdirSync, readFileSync, writeFileSync } from 'node:fs';
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

const recordSources = {
  name: 'record-sources',
  closeBundle() {
    writeFileSync(`${OUT}/sources.sha256`, `${sourceHash()}\n`);
  },
};

export default defineConfig({
  base: './',
  plugins: [svelte({ compilerOptions: { css: 'external' } }), recordSources],
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
