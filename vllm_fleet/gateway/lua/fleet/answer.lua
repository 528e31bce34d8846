-- Answers of the gateway itself, in the format of OpenAI's errors.

local cjson = require "cjson"

local M = {}

local TYPES = {
  [400] = "BadRequestError",
  [401] = "AuthenticationError",
  [403] = "PermissionDeniedError",
  [404] = "NotFoundError",
  [405] = "MethodNotAllowedError",
  [408] = "RequestTimeoutError",
  [413] = "RequestTooLargeError",
  [414] = "RequestTooLargeError",
  [429] = "RateLimitError",
  [431] = "RequestTooLargeError",
  [502] = "BadGatewayError",
  [503] = "ServiceUnavailableError",
  [504] = "GatewayTimeoutError",
}

-- What nginx refuses by itself, before any Lua ran.
local MESSAGES = {
  [400] = "The request is not valid HTTP, or plain HTTP on a TLS port.",
  [403] = "This address may not ask that here.",
  [404] = "There is no such path.",
  [405] = "This method is not allowed here.",
  [408] = "The request took too long to arrive.",
  [413] = "The request body is larger than this gateway accepts.",
  [414] = "The request's address is too long.",
  [429] = "Too many requests at once from one address; send fewer, or have the address put into "
          .. "gateway.connections_unlimited.",
  [431] = "The request's headers are too large.",
}

-- A string as JSON. cjson escapes the slash, which is allowed and ugly.
function M.quote(text)
  return (cjson.encode(text):gsub("\\/", "/"))
end

function M.json(status, body)
  ngx.status = status
  ngx.header["Content-Type"] = "application/json"
  ngx.header["Content-Length"] = #body + 1
  ngx.print(body, "\n")
  return ngx.exit(ngx.HTTP_OK)  -- ends the request in any phase; the status is sent already
end

-- Ends the request. `param` names the field at fault, where it is one; `code` is a word that
-- clients look for, else the status.
function M.error(status, message, param, code)
  return M.json(status, string.format(
    '{"error":{"message":%s,"type":"%s","param":%s,"code":%s}}',
    M.quote(message), TYPES[status] or "InternalServerError", param and M.quote(param) or "null",
    code and M.quote(code) or status))
end

-- For what may work a little later; 503 where no other status is given.
function M.later(message, seconds, status)
  ngx.header["Retry-After"] = seconds
  return M.error(status or 503, message)
end

-- A page for people, which may hold and fetch nothing but its own.
function M.page(html, nonce)
  local header = ngx.header
  header["Content-Type"] = "text/html; charset=utf-8"
  header["Content-Length"] = #html
  header["Content-Security-Policy"] = "default-src 'none'; style-src 'nonce-" .. nonce
    .. "'; script-src 'nonce-" .. nonce .. "'; connect-src 'self'; img-src data:; "
    .. "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
  header["X-Content-Type-Options"] = "nosniff"
  header["Referrer-Policy"] = "no-referrer"
  ngx.print(html)
  return ngx.exit(ngx.HTTP_OK)
end

-- 429 for what is too much now.
function M.busy(message, seconds)
  ngx.header["Retry-After"] = seconds
  return M.error(429, message)
end

-- 429 for what is too much now, for so many seconds; or, without them, for good.
function M.busy(message, seconds)
  if seconds then
    ngx.header["Retry-After"] = seconds
  else
    ngx.header["x-should-retry"] = "false"  -- known to OpenAI's clients
  end
  return M.error(429, message)
end

-- In the location of nginx's own errors.
function M.nginx_error()
  local status = ngx.status >= 400 and ngx.status or 500
  if status == 429 then
    ngx.header["Retry-After"] = 5
  end
  return M.error(status, MESSAGES[status] or "The gateway failed; see its error log.")
end

return M
