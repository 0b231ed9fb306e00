// Uploads by Node, over HTTP/1 or 2, which watches for the response while it writes. Prints how many get the refusal.

import http from 'node:http';
import http2 from 'node:http2';
import https from 'node:https';

const [url, size, count, version] = process.argv.slice(2);
const body = Buffer.alloc(Number(size), 'x');

function upload(done) {
    if (version === '2') {
        const client = http2.connect(url, { rejectUnauthorized: false });
        const end = (outcome) => { client.destroy(); done(outcome); };
        client.on('error', (error) => end(error.code));
        const request = client.request({ ':method': 'POST', ':path': '/' });
        let head = {};
        request.on('response', (headers) => { head = headers; });
        request.on('data', () => {});
        request.on('end', () => end(head[':status'] === 429 && !head['retry-after'] ? 'no wait' : head[':status']));
        request.on('error', (error) => end(error.code));
        request.setTimeout(20_000, () => end('timeout'));
        return request.end(body);
    }
    const headers = { 'content-length': body.length };
    const options = { method: 'POST', agent: false, rejectUnauthorized: false, headers };
    const request = (url.startsWith('https') ? https : http).request(url, options, (response) => {
        response.resume();
        const outcome = response.statusCode === 429 && !response.headers['retry-after'] ? 'no wait' : response.statusCode;
        response.on('end', () => done(outcome));
        response.on('error', (error) => done(error.code));
    });
    request.setTimeout(20_000, () => { done('timeout'); request.destroy(); });
    request.on('error', (error) => done(error.code));
    request.end(body);
}

let refused = 0;
const others = {};
for (let sent = 0; sent < Number(count); sent += 1) {
    const outcome = await new Promise(upload);
    if (outcome === 429) refused += 1;
    else others[outcome] = (others[outcome] ?? 0) + 1;
}
console.log(refused, Object.keys(others).length ? JSON.stringify(others) : '');
process.exit(0);
