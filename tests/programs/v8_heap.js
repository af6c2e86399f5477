// V8's own heap: OBJECTS small objects, of which STEPS are used and some replaced. If MS is set, waits
// until 60 % of its anonymous memory is huge, for MS at most, and prints the share.
const [objects, steps, ms] = process.argv.slice(2).map(Number);
const all = new Array(objects);
for (let i = 0; i < objects; i++) all[i] = { id: i, name: `object ${i}`, tags: [i, i + 1] };
let random = 88172645, sum = 0;
for (let step = 0; step < steps; step++) {
  random = (Math.imul(random, 1103515245) + 12345) & 0x7fffffff;
  const at = random % objects;
  sum += all[at].tags[1] + all[at].name.length;
  if (step % 8 === 0) all[at] = { id: at, name: `object ${step}`, tags: [step, step + 1] };
}
console.log(`sum ${sum}`);
if (ms !== undefined) {
  const end = Date.now() + ms;
  const timer = setInterval(() => {
    const text = require('fs').readFileSync('/proc/self/smaps_rollup', 'utf8');
    const of = (name) => Number(text.match(new RegExp(`\n${name}: +(\\d+)`))[1]);
    const share = Math.round(100 * of('AnonHugePages') / of('Anonymous'));
    if (share < 60 && Date.now() < end) return;
    clearInterval(timer);
    console.log(`share=${share}`);
    console.log(`mib=${of('Anonymous') >> 10}`, all.length);
  }, 100);
}
