// Serves the reference server's file-backed store: node durable_streams.mjs PACKAGES PORT DATA
import { join } from "node:path"
import { pathToFileURL } from "node:url"

const [packages, port, dataDir] = process.argv.slice(2)
const entry = join(packages, "node_modules/@durable-streams/server/dist/index.js")
const { DurableStreamTestServer } = await import(pathToFileURL(entry))
const server = new DurableStreamTestServer({ host: "127.0.0.1", port: Number(port), dataDir })
await server.start()
process.on("SIGTERM", () => server.stop().finally(() => process.exit(0)))
console.log("ready")
