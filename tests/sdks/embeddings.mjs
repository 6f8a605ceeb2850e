// node embeddings.mjs MAJOR EDGE TEXTS: the vectors that npm's SDKs make of what they are sent.
import { aiSdk, openAi } from "./majors.mjs";

const [major, edge, texts] = process.argv.slice(2);
const { createOpenAICompatible, embedMany } = await aiSdk(major);
const OpenAI = await openAi(major);
const values = JSON.parse(texts);
const baseURL = `${edge}/v1`;

const client = new OpenAI({ apiKey: "none", baseURL, maxRetries: 0 });
const { data } = await client.embeddings.create({ model: "model", input: values });

const model = createOpenAICompatible({ name: "tailrace", baseURL }).embeddingModel("model");
const { embeddings } = await embedMany({ model, values });

console.log(JSON.stringify({ openai: data.map((each) => each.embedding), ai: embeddings }));
