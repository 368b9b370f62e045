// SPDX-License-Identifier: Apache-2.0
// With OpenAI's npm package (npm install openai). Usage: node openai_client.mjs [url] [side]
import fs from 'node:fs';
import OpenAI, { toFile } from 'openai';

const url = process.argv[2] ?? 'http://localhost:20000';
const side = process.argv[3] ?? '1024';
const size = `${side}x${side}`;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none' });
const model = (await client.models.list()).data[0].id;

const picture = await client.images.generate({ model, prompt: 'a red circle on a blue background', size });
fs.writeFileSync('openai-npm.png', Buffer.from(picture.data[0].b64_json, 'base64'));

const image = await toFile(fs.createReadStream('openai-npm.png'), 'openai-npm.png', { type: 'image/png' });
const edited = await client.images.edit({ model, prompt: 'make the circle green', image, size });
console.log(Buffer.from(edited.data[0].b64_json, 'base64').length, 'bytes');

for await (const event of await client.images.generate({ model, prompt: 'a star', size, stream: true, partial_images: 2 })) {
  console.log(event.type, Buffer.from(event.b64_json, 'base64').length, 'bytes');
}
