// What llama.cpp says of a GGUF file, by node-llama-cpp. Standard input and output are JSON: see llama_cpp_answers.py.

import {text} from "node:stream/consumers";
import {pathToFileURL} from "node:url";

const {library, file, ids, texts, prompt, more} = JSON.parse(await text(process.stdin));
const {getLlama} = await import(pathToFileURL(library));

const llama = await getLlama({gpu: false, build: "never", skipDownload: true, logLevel: "error", progressLogs: false});
const model = await llama.loadModel({modelPath: file, vocabOnly: ids.length + more === 0});
const {bos, eos, shouldPrependBosToken} = model.tokens;
const encode = (words) => [...(shouldPrependBosToken ? [bos] : []), ...model.tokenize(words)];
const answer = {eos, encoded: texts.map(encode), probabilities: [], continuation: []};

if (ids.length + more > 0) {
  const keys = {experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32"};
  const context = await model.createContext({contextSize: 64, sequences: 2, threads: 1, flashAttention: false, ...keys});
  // No sampler changes the logits.
  const generateNext = {probabilities: true, options: {temperature: 1, topK: 0, topP: 1, minP: 0}};
  const found = await context.getSequence().controlledEvaluate(ids.map((id) => [id, {generateNext}]));
  answer.probabilities = found.map(({next}) => [...next.probabilities]);
  const greedy = {temperature: 0, yieldEogToken: true};
  if (more > 0) {
    for await (const token of context.getSequence().evaluate(encode(prompt), greedy)) {
      if (answer.continuation.push(token) === more) break;
    }
  }
}
console.log(JSON.stringify(answer));
await llama.dispose();
