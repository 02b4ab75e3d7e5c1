// Reads a JSON list of diagrams from standard input and prints, for each, null or what the real
// Mermaid parser has against it.
import { JSDOM } from "jsdom";

// Mermaid cleans labels with DOMPurify, which looks for a document as it is loaded.
const { window } = new JSDOM("");
globalThis.window = window;
globalThis.document = window.document;
const { default: mermaid } = await import("mermaid");

let input = "";
for await (const chunk of process.stdin) input += chunk;
const verdicts = [];
for (const diagram of JSON.parse(input)) {
  try {
    await mermaid.parse(diagram);
    verdicts.push(null);
  } catch (error) {
    verdicts.push(String(error.message ?? error));
  }
}
console.log(JSON.stringify(verdicts));
