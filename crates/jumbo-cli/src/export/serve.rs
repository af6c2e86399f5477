//! GET /metrics over HTTP/1.1.
//!
//! Each connection has one request, a thread and deadlines: a slow client delays no other client.
//! Requests have no body, so std and a parser of the head suffice.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use jumbo_host::kernel::process::Signals;
use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;
use rustix::event::{PollFd, PollFlags};

use crate::signal::poll;
use crate::view::tell;

/// Timeout of a client that sends its request, and again of one that reads the response.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of concurrent connections; others are closed at once.
const MAX_CLIENTS: usize = 64;
const MAX_HEAD_BYTES: usize = 16 << 10;
const MAX_HEADERS: usize = 64;

/// Serves the result of `metrics(max_series)` until a termination signal.
pub(super) fn until_ended(
    address: SocketAddr,
    metrics: fn(usize) -> anyhow::Result<String>,
    max_series: usize,
) -> anyhow::Result<ExitCode> {
    let listener = TcpListener::bind(address).with_context(|| {
        format!("cannot listen on {address}\nhint: port 0 takes a free one, 127.0.0.1 this host's clients alone")
    })?;
    listener.set_nonblocking(true)?;
    // Before the first thread: threads inherit the signal mask.
    let signals = Signals::take().context("cannot read signals from a descriptor")?;
    tell(&format!(
        "serving http://{}/metrics",
        listener.local_addr()?
    ));
    let (clients, last) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(None)));
    loop {
        let fds = [signals.as_fd(), listener.as_fd()];
        let mut ready = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        poll(&mut ready, None)?;
        while let Some(signal) = signals.next()? {
            if let libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT = signal.number {
                return Ok(ExitCode::SUCCESS);
            }
        }
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, perhaps: wait until a client disconnects.
                if error.kind() != ErrorKind::WouldBlock {
                    std::thread::sleep(Duration::from_millis(50));
                }
                continue;
            }
        };
        let client = Client(Arc::clone(&clients));
        if clients.fetch_add(1, Ordering::Relaxed) >= MAX_CLIENTS {
            continue;
        }
        let last = Arc::clone(&last);
        let thread = std::thread::Builder::new().name(String::from("jumbo-client"));
        let handle = move || {
            let _client = client;
            let metrics = || read(&last, || metrics(max_series));
            // Errors of a disconnected client are ignored.
            let _ = serve(stream, metrics);
        };
        // Without a thread the connection is closed.
        let _ = thread.spawn(handle);
    }
}

/// Time at which the metrics were read last, and their text.
type Last = Mutex<Option<(Instant, String)>>;

/// Returns the metrics, read after the call. There is one reader at a time: several would compete for the
/// CPU. Those that wait for it share what the next one reads.
fn read(last: &Last, metrics: impl Fn() -> anyhow::Result<String>) -> anyhow::Result<String> {
    let asked = Instant::now();
    let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, text)) = last.as_ref().filter(|(begun, _)| *begun >= asked) {
        return Ok(text.clone());
    }
    let begun = Instant::now();
    let text = metrics()?;
    *last = Some((begun, text.clone()));
    Ok(text)
}

struct Client(Arc<AtomicUsize>);

impl Drop for Client {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn serve(mut stream: TcpStream, metrics: impl Fn() -> anyhow::Result<String>) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let (status, has_body, body) = match request(&mut stream)? {
        None => ("400 Bad Request", true, String::from("no HTTP request\n")),
        Some((method, _)) if method != "GET" && method != "HEAD" => {
            let allowed = String::from("GET and HEAD are allowed\n");
            ("405 Method Not Allowed\r\nAllow: GET, HEAD", true, allowed)
        }
        Some((method, path)) if path == "/metrics" => {
            let (status, body) = match metrics() {
                Ok(text) => ("200 OK", text),
                Err(error) => ("500 Internal Server Error", format!("{error:#}\n")),
            };
            (status, method == "GET", body)
        }
        Some((method, _)) => {
            let place = String::from("the metrics are at /metrics\n");
            ("404 Not Found", method == "GET", place)
        }
    };
    let mut response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    if has_body {
        response.push_str(&body);
    }
    send(&mut stream, response.as_bytes())
}

/// Reads the method and the path without the query; `None`: no valid request.
fn request(stream: &mut TcpStream) -> io::Result<Option<(String, String)>> {
    let deadline = Instant::now() + CLIENT_TIMEOUT;
    let (mut head, mut chunk) = (Vec::new(), [0; 1024]);
    loop {
        stream.set_read_timeout(Some(left(deadline)?))?;
        let length = stream.read(&mut chunk)?;
        head.extend_from_slice(chunk.get(..length).unwrap_or_default());
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(&head) {
            Ok(httparse::Status::Complete(_)) => {
                let path = request.path.unwrap_or_default().split('?').next();
                let method = request.method.unwrap_or_default().to_owned();
                return Ok(path.map(|path| (method, path.to_owned())));
            }
            Ok(httparse::Status::Partial) if length > 0 && head.len() < MAX_HEAD_BYTES => {}
            Ok(httparse::Status::Partial) | Err(_) => return Ok(None),
        }
    }
}

fn send(stream: &mut TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let deadline = Instant::now() + CLIENT_TIMEOUT;
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        let written = stream.write(bytes)?;
        bytes = bytes.get(written..).unwrap_or_default();
    }
    Ok(())
}

/// Remaining time until the deadline; `TimedOut` after it.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    Some(left)
        .filter(|left| !left.is_zero())
        .ok_or_else(|| ErrorKind::TimedOut.into())
}
