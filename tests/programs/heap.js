// Buffers, large arrays and many small objects, as in typical Node programs.
const buffers = [];
for (let i = 0; i < 64; i++) buffers.push(Buffer.alloc(4 << 20, i));
const numbers = new Float64Array(16 << 20).map((_, i) => i % 1000);
const objects = [];
for (let i = 0; i < 1_000_000; i++) objects.push({ id: i, name: `object ${i}`, tags: [i, i + 1] });
let sum = 0;
for (const buffer of buffers) sum += buffer[buffer.length - 1];
for (const number of numbers) sum += number;
for (const object of objects) sum += object.tags[1] + object.name.length;
console.log(`sum ${sum}`);
console.error(`objects ${objects.length}`);
process.exitCode = 3;
