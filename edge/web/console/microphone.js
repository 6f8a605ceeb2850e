// The microphone as PCM.

import { Downsampler } from "./pcm.js";

/** Number of samples in one block: 43 ms at 48 kHz. */
const BLOCK = 2048;

/** Open the microphone and call `heard` with each block of its sound as PCM.
 *
 * A ScriptProcessorNode is used although it is deprecated: the page's Content-Security-Policy allows
 * only scripts with the nonce of this response, and the module of an AudioWorklet cannot have one.
 *
 * @param {(pcm: Uint8Array) => void} heard
 * @returns {Promise<() => void>} a function that closes the microphone
 */
export async function openMicrophone(heard) {
  if (!navigator.mediaDevices) throw new Error("This browser opens a microphone only for https:// and localhost.");
  const sound = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
  const context = new AudioContext();
  const source = context.createMediaStreamSource(sound);
  const blocks = context.createScriptProcessor(BLOCK, 1, 1);
  const downsampler = new Downsampler(context.sampleRate);
  blocks.onaudioprocess = ({ inputBuffer }) => heard(downsampler.feed(inputBuffer.getChannelData(0)));
  source.connect(blocks);
  blocks.connect(context.destination); // a node without a destination is not run; its output is silent
  await context.resume();
  return () => {
    blocks.onaudioprocess = null;
    for (const track of sound.getTracks()) track.stop();
    void context.close();
  };
}
