const words = [];
for (let i = 0; i < 20000; i++) words.push((i * 2654435761 % 4294967296).toString(36));
let found = 0;
for (let round = 0; round < 8; round++) {
    const text = JSON.stringify(words.map((word, i) => ({ word, i, list: [word, round] })));
    const parsed = JSON.parse(text);
    parsed.sort((a, b) => a.word < b.word ? -1 : 1);
    found += text.replace(/[a-f]+([0-9])/g, '$1-').split('-').length;
    const groups = new Map();
    for (const { word, i } of parsed) groups.set(word.slice(0, 2), (groups.get(word.slice(0, 2)) || 0) + i);
    found += groups.size + new Function('x', 'return x + ' + round)(1);
}
if (found < 1000) process.exit(1);
