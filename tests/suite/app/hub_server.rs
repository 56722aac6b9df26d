//! A stand-in for the Hugging Face hub on the loopback interface. It answers as the hub does: with a
//! list of a repository's files, file requests with ETag, X-Repo-Commit and ranges, large files by a
//! redirect to another address. It can also fail in the ways that servers and networks fail.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// The commit that every file is of.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The list of the repository's files, as if it were one of them.
pub const LISTING: &str = "listing";

/// What the server does about one file.
#[derive(Clone)]
pub enum Answer {
    /// Sends it.
    File(Vec<u8>),
    /// Sends it by a redirect, as the hub does for large files.
    Elsewhere(Vec<u8>),
    /// Announces it, but ends the connection after so many bytes of the file, as often as given.
    Cut {
        bytes: Vec<u8>,
        after: usize,
        times: usize,
    },
    /// Announces it, but stands still after so many bytes of the file.
    Stall { bytes: Vec<u8>, after: usize },
    /// Announces it, but answers the request for the body with an error page.
    ErrorPage(Vec<u8>),
    /// An HTTP status with the hub's X-Error-Code.
    Status(u16, &'static str),
    /// Takes the request and never answers.
    Silence,
}

/// A running server. It stops taking connections when it is dropped.
pub struct Hub {
    address: String,
    state: Arc<State>,
}

struct State {
    repo: String,
    answers: Mutex<HashMap<String, Answer>>,
    /// Request lines and Authorization headers, in order.
    seen: Mutex<Vec<String>>,
    closed: Mutex<bool>,
    address: String,
}

impl Hub {
    /// Serves the files of `repo` (`owner/name`); anything else is not found.
    pub fn serve(repo: &str, files: impl IntoIterator<Item = (&'static str, Answer)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a loopback port");
        let address = format!("http://{}", listener.local_addr().expect("its address"));
        let state = Arc::new(State {
            repo: repo.to_owned(),
            answers: Mutex::new(
                files
                    .into_iter()
                    .map(|(name, answer)| (name.to_owned(), answer))
                    .collect(),
            ),
            seen: Mutex::new(Vec::new()),
            closed: Mutex::new(false),
            address: address.clone(),
        });
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if *shared.closed.lock().expect("not poisoned") {
                    break;
                }
                let state = Arc::clone(&shared);
                // A client that has gone away is no matter.
                thread::spawn(move || drop(state.answer(stream)));
            }
        });
        Self { address, state }
    }

    /// What HF_ENDPOINT has to be.
    pub fn endpoint(&self) -> &str {
        &self.address
    }

    /// Changes what happens to a file.
    pub fn set(&self, name: &str, answer: Answer) {
        self.state
            .answers
            .lock()
            .expect("not poisoned")
            .insert(name.to_owned(), answer);
    }

    /// How many requests of this method were made for a file. Those for one byte, which ask what a
    /// file is, count as `HEAD`.
    pub fn requests(&self, method: &str, name: &str) -> usize {
        let seen = self.state.seen.lock().expect("not poisoned");
        seen.iter()
            .filter(|line| line.starts_with(method) && line.ends_with(name))
            .count()
    }

    /// Whether a request carried this token.
    pub fn saw_token(&self, token: &str) -> bool {
        let seen = self.state.seen.lock().expect("not poisoned");
        seen.iter().any(|line| line == &format!("Bearer {token}"))
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        *self.state.closed.lock().expect("not poisoned") = true;
        // Wakes the thread that waits for connections.
        let _ = TcpStream::connect(self.address.trim_start_matches("http://"));
    }
}

/// What a client asks for.
struct Request {
    /// `HEAD` also where one byte is asked for.
    method: String,
    path: String,
    /// The bytes of the file that are wanted; the last may be open.
    range: Option<(usize, Option<usize>)>,
}

impl State {
    fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let request = self.read_request(&stream)?;
        if let Some(rest) = request.path.strip_prefix("/api/models/") {
            return self.list(&mut stream, rest);
        }
        let (name, redirected) = match request.path.split_once("/resolve/") {
            Some((repo, rest)) if repo.trim_start_matches('/') == self.repo => {
                let (revision, name) = rest.split_once('/').unwrap_or((rest, ""));
                if !known(revision) {
                    return status(&mut stream, 404, "RevisionNotFound");
                }
                (name.to_owned(), false)
            }
            Some(_) => return status(&mut stream, 404, "RepoNotFound"),
            None => (
                request.path.trim_start_matches("/storage/").to_owned(),
                true,
            ),
        };
        let answer = self.take_answer(&name, &request.method);
        let head = request.method == "HEAD";
        match answer {
            None => status(&mut stream, 404, "EntryNotFound"),
            Some(Answer::Status(code, error)) => status(&mut stream, code, error),
            Some(Answer::Silence) => silence(stream),
            Some(Answer::Elsewhere(bytes)) if !redirected => {
                write!(
                    stream,
                    "HTTP/1.1 302 Found\r\nLocation: {}/storage/{name}\r\nX-Linked-Size: {}\r\n\
                     X-Linked-Etag: \"{}\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Length: 0\r\n\
                     Connection: close\r\n\r\n",
                    self.address,
                    bytes.len(),
                    etag(&name, &bytes)
                )
            }
            Some(Answer::ErrorPage(_)) if !head => status(&mut stream, 500, "Internal"),
            Some(Answer::Cut { bytes, after, .. }) if !head => {
                send(&mut stream, &request, &name, &bytes, after)
            }
            Some(Answer::Stall { bytes, after }) if !head => {
                send(&mut stream, &request, &name, &bytes, after)?;
                silence(stream)
            }
            Some(
                Answer::File(bytes)
                | Answer::Elsewhere(bytes)
                | Answer::Cut { bytes, .. }
                | Answer::Stall { bytes, .. }
                | Answer::ErrorPage(bytes),
            ) => send(&mut stream, &request, &name, &bytes, bytes.len()),
        }
    }

    /// What `rest`, a repository and its revision, holds.
    fn list(&self, stream: &mut TcpStream, rest: &str) -> std::io::Result<()> {
        let (repo, revision) = rest.split_once("/revision/").unwrap_or((rest, "main"));
        if repo != self.repo || !known(revision) {
            return status(stream, 404, "NotFound");
        }
        match self.take_answer(LISTING, "GET") {
            Some(Answer::Status(code, error)) => return status(stream, code, error),
            Some(Answer::Silence) => return silence(stream.try_clone()?),
            _ => {}
        }
        let answers = self.answers.lock().expect("not poisoned");
        let files: Vec<_> = answers
            .iter()
            .filter(|(_, answer)| !matches!(answer, Answer::Status(404, _)))
            .map(|(name, _)| serde_json::json!({ "rfilename": name }))
            .collect();
        let body = serde_json::json!({ "sha": COMMIT, "siblings": files }).to_string();
        write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n{body}",
            body.len()
        )
    }

    fn read_request(&self, stream: &TcpStream) -> std::io::Result<Request> {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let mut words = line.split_whitespace();
        let mut method = words.next().unwrap_or_default().to_owned();
        let path = words.next().unwrap_or_default().to_owned();
        let mut seen = Vec::new();
        let mut range = None;
        loop {
            let mut header = String::new();
            if reader.read_line(&mut header)? <= 2 {
                break;
            }
            match header.split_once(':') {
                Some((name, value)) if name.eq_ignore_ascii_case("authorization") => {
                    seen.push(value.trim().to_owned());
                }
                Some((name, value)) if name.eq_ignore_ascii_case("range") => {
                    let bytes = value.trim().strip_prefix("bytes=").expect("a range");
                    let (first, last) = bytes.split_once('-').expect("a range");
                    range = Some((first.parse().expect("a number"), last.parse().ok()));
                }
                _ => {}
            }
        }
        if range == Some((0, Some(0))) {
            method = "HEAD".to_owned();
        }
        seen.push(format!("{method} {path}"));
        self.seen.lock().expect("not poisoned").extend(seen);
        Ok(Request {
            method,
            path,
            range,
        })
    }

    /// What to do now; a connection that is cut only so often is whole afterwards.
    fn take_answer(&self, name: &str, method: &str) -> Option<Answer> {
        let mut answers = self.answers.lock().expect("not poisoned");
        let answer = answers.get_mut(name)?;
        let now = answer.clone();
        if let Answer::Cut { bytes, times, .. } = answer
            && method == "GET"
        {
            *times -= 1;
            if *times == 0 {
                *answer = Answer::File(std::mem::take(bytes));
            }
        }
        Some(now)
    }
}

/// Announces the wanted part of a file and sends what of it lies before `until`.
fn send(
    stream: &mut TcpStream,
    request: &Request,
    name: &str,
    bytes: &[u8],
    until: usize,
) -> std::io::Result<()> {
    let (first, last) = request.range.unwrap_or((0, None));
    let end = last.map_or(bytes.len(), |last| bytes.len().min(last + 1));
    if first >= end {
        return status(stream, 416, "RangeNotSatisfiable");
    }
    write!(
        stream,
        "HTTP/1.1 206 Partial Content\r\nETag: \"{}\"\r\nX-Repo-Commit: {COMMIT}\r\n\
         Content-Length: {}\r\nContent-Range: bytes {first}-{}/{}\r\nConnection: close\r\n\r\n",
        etag(name, bytes),
        end - first,
        end - 1,
        bytes.len()
    )?;
    stream.write_all(&bytes[first..until.clamp(first, end)])
}

/// Holds the connection until the client gives up.
fn silence(mut stream: TcpStream) -> std::io::Result<()> {
    stream.read_to_end(&mut Vec::new()).map(drop)
}

fn known(revision: &str) -> bool {
    revision == "main" || revision == COMMIT
}

fn status(stream: &mut TcpStream, code: u16, error: &str) -> std::io::Result<()> {
    let body = "<html>no model here</html>";
    write!(
        stream,
        "HTTP/1.1 {code} -\r\nX-Error-Code: {error}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// Different for different contents, as the hub's are.
fn etag(name: &str, bytes: &[u8]) -> String {
    let sum = bytes.iter().fold(0u64, |sum, byte| {
        sum.wrapping_mul(31).wrapping_add(u64::from(*byte))
    });
    format!("{}-{}-{sum:x}", name.replace('.', "-"), bytes.len())
}
