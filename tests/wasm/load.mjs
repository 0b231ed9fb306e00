// Prints the report of the module: node load.mjs MODULE
import { readFileSync } from "node:fs";

const module = new WebAssembly.Module(readFileSync(process.argv[2]));
// Without an operating system the module imports nothing.
const { memory, report_start, report_length } = new WebAssembly.Instance(module, {}).exports;
const [start, length] = [report_start(), report_length()];
process.stdout.write(Buffer.from(memory.buffer, start, length));
