// Helpers of Anthropic's SDK of npm against edges: node anthropic_helpers.mjs MAJOR ADDER_EDGE DEMO_EDGE
// The producer behind the first edge calls tools, and the model behind the second one fills a schema.

import { anthropic, anthropicHelpers } from "./majors.mjs";

const [major, ...edges] = process.argv.slice(2);
const Anthropic = await anthropic(major);
const { betaTool, jsonSchemaOutputFormat } = await anthropicHelpers(major);
const [adder, demo] = edges.map((baseURL) => new Anthropic({ baseURL, apiKey: "unused", maxRetries: 0 }));
const numbers = { type: "array", items: { type: "number" } };
const tools = [
  betaTool({
    name: "add",
    description: "Adds numbers.",
    inputSchema: { type: "object", properties: { numbers }, required: ["numbers"] },
    run: ({ numbers }) => String(numbers.reduce((sum, one) => sum + one, 0)),
  }),
  betaTool({ name: "now", description: "Tells the time.", inputSchema: { type: "object" }, run: () => "noon" }),
];

/** The final text of a conversation in which the SDK runs the tools. */
async function run(stream) {
  const messages = [{ role: "user", content: "What is 12 + 30?" }];
  const runner = adder.beta.messages.toolRunner({ model: "adder", max_tokens: 2000, tools, messages, stream });
  return (await runner.runUntilDone()).content.at(-1).text;
}

const schema = {
  type: "object",
  properties: { town: { type: "string" }, sunny: { type: "boolean" } },
  required: ["town", "sunny"],
  additionalProperties: false,
};
const { parsed_output: parsed } = await demo.messages.parse({
  model: "demo",
  max_tokens: 300,
  messages: [{ role: "user", content: "The weather?" }],
  output_config: { format: jsonSchemaOutputFormat(schema) },
});
console.log(JSON.stringify({ run: [await run(false), await run(true)], parsed }));
