-- Who asks: the key a client shows, looked up by its SHA-256, so that neither memory nor disk of
-- the gateway holds a key, and no comparison depends on how much of a guess is right.

local ffi = require "ffi"
local config = require "fleet.config"

pcall(ffi.cdef, "unsigned char *SHA256(const unsigned char *d, size_t n, unsigned char *md);")

local digest = ffi.new("unsigned char[32]")

local M = {}

local function sha256(text)
  ffi.C.SHA256(text, #text, digest)  -- of libcrypto, which nginx itself is linked with
  return (ffi.string(digest, 32):gsub(".", function(c)
    return string.format("%02x", c:byte())
  end))
end

-- The name of the key this request shows ("-" where none is asked for), or nil.
-- OpenAI's clients send `Authorization: Bearer`, Anthropic's `x-api-key`.
function M.name()
  local keys = config.keys()
  if not keys then
    return "-"
  end
  local shown = ngx.var.http_authorization
  shown = shown and shown:match("^[Bb][Ee][Aa][Rr][Ee][Rr] +(.+)$") or ngx.var.http_x_api_key
  return shown and keys[sha256(shown)]
end

return M
