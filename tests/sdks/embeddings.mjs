// node embeddings.mjs EDGE TEXTS: the vectors that npm's SDKs make of what they are sent.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany } from "ai";
import OpenAI from "openai";

const [edge, texts] = process.argv.slice(2);
const values = JSON.parse(texts);
const baseURL = `${edge}/v1`;

const client = new OpenAI({ apiKey: "none", baseURL, maxRetries: 0 });
const { data } = await client.embeddings.create({ model: "model", input: values });

const model = createOpenAICompatible({ name: "tailrace", baseURL }).textEmbeddingModel("model");
const { embeddings } = await embedMany({ model, values });

console.log(JSON.stringify({ openai: data.map((each) => each.embedding), ai: embeddings }));
