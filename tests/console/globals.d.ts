/** Vendored, and loaded by a script element of its own. */
interface Window {
  uPlot: any;
}
