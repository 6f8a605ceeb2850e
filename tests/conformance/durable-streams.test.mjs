// The suite's own `npx … --run` finds no tests, because vitest skips node_modules: it has to
// be called from a test file outside.
import { runConformanceTests } from "@durable-streams/server-conformance-tests"

runConformanceTests({
  baseUrl: process.env.CONFORMANCE_TEST_URL,
  longPollTimeoutMs: Number(process.env.LPT ?? 20_000),
  subscriptions: process.env.SUBS === "1",
})
