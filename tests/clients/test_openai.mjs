// SPDX-License-Identifier: Apache-2.0
// The real openai npm package against a running server. Usage: node test_openai.mjs URL [URL with a key]
import assert from 'node:assert/strict';
import zlib from 'node:zlib';
import OpenAI, { toFile } from 'openai';

const options = { apiKey: 'none', maxRetries: 0 };
const client = new OpenAI({ ...options, baseURL: `${process.argv[2]}/v1` });
const size = '64x48';

/** A PNG of one colour, without any package. */
function png(colour, side = 64) {
  const chunk = (kind, data) => {
    const body = Buffer.concat([Buffer.from(kind), data]);
    const frame = Buffer.alloc(8 + body.length);
    frame.writeUInt32BE(data.length, 0);
    body.copy(frame, 4);
    frame.writeUInt32BE(crc32(body), 4 + body.length);
    return frame;
  };
  const head = Buffer.from([0, 0, 0, side, 0, 0, 0, side, 8, 2, 0, 0, 0]);
  const row = Buffer.from([0, ...Array(side).fill(colour).flat()]);
  const rows = zlib.deflateSync(Buffer.concat(Array(side).fill(row)));
  return Buffer.concat([Buffer.from('\x89PNG\r\n\x1a\n', 'latin1'), chunk('IHDR', head), chunk('IDAT', rows), chunk('IEND', Buffer.alloc(0))]);
}
function crc32(bytes) {
  let crc = -1;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
  }
  return ~crc >>> 0;
}
const file = (colour, name) => toFile(png(colour), name, { type: 'image/png' });
const sizeOf = data => {
  const bytes = Buffer.from(data, 'base64');
  return `${bytes.readUInt32BE(16)}x${bytes.readUInt32BE(20)}`;
};
const collect = async stream => {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
};

assert.ok((await client.models.list()).data[0].id);
const made = await client.images.generate({ prompt: 'a circle', size, seed: 9 });
assert.equal(sizeOf(made.data[0].b64_json), size);
console.log('ok: generate');
const one = await client.images.edit({ prompt: 'change', image: await file([255, 0, 0], 'a.png'), size });
assert.equal(sizeOf(one.data[0].b64_json), size);
console.log('ok: edit, one image');
const images = [await file([255, 0, 0], 'a.png'), await file([0, 0, 255], 'b.png')];
assert.equal(sizeOf((await client.images.edit({ prompt: 'change', image: images, size })).data[0].b64_json), size);
console.log('ok: edit, several images');
const events = await collect(await client.images.generate({ prompt: 'a circle', size, seed: 9, stream: true, partial_images: 2 }));
const partial = 'image_generation.partial_image';
assert.deepEqual(events.map(event => event.type), [partial, partial, 'image_generation.completed']);
assert.equal(events.at(-1).b64_json, made.data[0].b64_json);
console.log('ok: stream');
await assert.rejects(client.images.generate({ prompt: 'x', size: '7x7' }), OpenAI.UnprocessableEntityError);
await assert.rejects(client.get('/nowhere'), OpenAI.NotFoundError);
if (process.argv[3]) {
  await assert.rejects(new OpenAI({ ...options, baseURL: `${process.argv[3]}/v1` }).models.list(), OpenAI.AuthenticationError);
}
console.log('ok: errors are their classes');
