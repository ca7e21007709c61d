"""What talks to a server over HTTP: `quire chat --url`, `quire complete`, `quire run-batch` and the
load of `quire bench serve`. It knows the public protocol only, and so works with other servers."""
