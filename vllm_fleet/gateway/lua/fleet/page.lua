-- /status for people: one page of HTML, whole in itself. A few lines of script fetch it anew and
-- put the new state in place; without script the browser loads it anew by itself.

local M = {}

-- Text as HTML, in an element or a quoted attribute.
local function escape(text)
  return (tostring(text):gsub("[&<>\"']", {
    ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;", ["'"] = "&#39;",
  }))
end
M.escape = escape

local STYLE = [[
:root{color-scheme:light dark;--back:#f6f7f9;--card:#fff;--text:#1b2330;--soft:#5b6676;
--line:#dfe3e9;--good:#17713b;--good-back:#dff3e6;--warn:#8a5300;--warn-back:#fdeecb;
--bad:#b3261e;--bad-back:#fde3e1;--link:#1a56b0}
@media (prefers-color-scheme:dark){:root{--back:#12161c;--card:#1b2129;--text:#e6eaf0;
--soft:#9aa6b6;--line:#303946;--good:#7bd59b;--good-back:#173523;--warn:#f1c069;
--warn-back:#3d2e10;--bad:#ff9b93;--bad-back:#46201d;--link:#8ab8ff}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:80rem;background:var(--back);color:var(--text);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
header{display:flex;flex-wrap:wrap;gap:.25rem 1rem;align-items:baseline;margin-bottom:1rem}
h1{font-size:1.3rem;margin:0}
h2{font-size:1.05rem;margin:1.75rem 0 .5rem}
a{color:var(--link)}
#live{color:var(--soft);margin-left:auto}
#live.old{color:var(--bad);font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(7.5rem,1fr));gap:.6rem;margin:0}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:.5rem;
padding:.55rem .75rem}
.tiles dt{color:var(--soft);font-size:.85rem}
.tiles dd{margin:0;font-size:1.45rem;font-weight:600;font-variant-numeric:tabular-nums}
.tiles .bad dd{color:var(--bad)}
.tiles .warn dd{color:var(--warn)}
.sheet{background:var(--card);border:1px solid var(--line);border-radius:.5rem;overflow-x:auto}
table{border-collapse:collapse;width:100%}
th,td{padding:.4rem .75rem;text-align:left;border-top:1px solid var(--line);
overflow-wrap:anywhere}
thead th{border-top:0;color:var(--soft);font-weight:500;font-size:.85rem;white-space:nowrap;
vertical-align:bottom;overflow-wrap:normal}
tbody th{font-weight:600}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.n.bad{color:var(--bad);font-weight:600}
small{display:block;color:var(--soft);font-weight:400}
.state{display:inline-block;border-radius:1rem;padding:.05rem .55rem;font-size:.85rem;
white-space:nowrap}
.state.ready{background:var(--good-back);color:var(--good)}
.state.draining{background:var(--warn-back);color:var(--warn)}
.state.not,.state.broken{background:var(--bad-back);color:var(--bad)}
details{margin-top:.6rem;background:var(--card);border:1px solid var(--line);
border-radius:.5rem;overflow-x:auto}
summary{padding:.55rem .75rem;cursor:pointer;font-weight:600;overflow-wrap:anywhere}
summary span{color:var(--soft);font-weight:400}
#find{font:inherit;width:100%;max-width:22rem;padding:.4rem .6rem;margin-bottom:.2rem;
border:1px solid var(--line);border-radius:.4rem;background:var(--card);color:inherit}
h1 small{display:inline;font-size:.9rem;margin-left:.35rem}
.hidden{display:none}
.instances{table-layout:fixed}
.instances th:nth-child(1){width:7rem}
.instances th:nth-child(n+3):nth-child(-n+5){width:5rem}
.instances th:nth-child(6){width:6.5rem}
.instances th:nth-child(7){width:15%}
.instances th:nth-child(8){width:17%}
.n+.text{padding-left:2rem}
footer{margin-top:1.5rem;color:var(--soft);font-size:.85rem}
@media (max-width:46rem){
body{padding:.75rem}
#live{margin-left:0;width:100%}
.tiles{grid-template-columns:repeat(12,1fr);gap:.4rem}
.tiles div{padding:.4rem .45rem;grid-column:span 4}
.tiles div:nth-child(n+4){grid-column:span 3}
.tiles dt{font-size:.78rem}
.tiles dd{font-size:1.05rem;white-space:nowrap}
thead,.wide{display:none}
tr{display:flex;flex-wrap:wrap;gap:.1rem .9rem;padding:.45rem .75rem;
border-top:1px solid var(--line)}
.sheet tr:first-child{border-top:0}
th,td{padding:0;border:0}
tbody th{width:100%}
.instances tr{position:relative}
.instances tbody th{order:-1;padding-right:6rem}
.instances td:first-child{position:absolute;right:.75rem;top:.45rem}
.n{text-align:left}
.n::after{content:" " attr(data-of);color:var(--soft);font-weight:400}
.n.none{display:none}
.text{color:var(--soft)}}
]]

local SCRIPT = [[
"use strict";
(function () {
  var EVERY = 3000, live = document.getElementById("live"), find = document.getElementById("find");
  var chosen = {}, since = Date.now();
  function filter() {
    var text = find.value.trim().toLowerCase();
    document.querySelectorAll("#instances details").forEach(function (pool) {
      var shown = 0;
      pool.querySelectorAll("tbody tr").forEach(function (row) {
        var hit = !text || row.dataset.find.toLowerCase().indexOf(text) >= 0;
        row.classList.toggle("hidden", !hit);
        shown += hit ? 1 : 0;
      });
      pool.classList.toggle("hidden", shown === 0 && text !== "");
      if (text) { pool.open = true; }
      else if (pool.id in chosen) { pool.open = chosen[pool.id]; }
      else { pool.open = pool.dataset.open === "1"; }
    });
  }
  function put(text) {
    text = text.replace(/<style[^]*?<\/style>/, "");  // its nonce is not this page's
    var page = new DOMParser().parseFromString(text, "text/html");
    if (!page.getElementById("instances")) { throw new Error("another page"); }
    since = Date.now();
    live.textContent = page.getElementById("live").textContent;
    live.className = "";
    document.title = page.title;
    if (!window.getSelection().isCollapsed) { return; }
    var focused = document.activeElement && document.activeElement.id;
    ["state", "instances"].forEach(function (id) {
      document.getElementById(id).replaceWith(document.importNode(page.getElementById(id), true));
    });
    filter();
    if (focused && focused !== "find" && document.getElementById(focused)) {
      document.getElementById(focused).focus({preventScroll: true});
    }
  }
  function ask() {
    if (document.hidden) { return again(); }
    fetch(location.pathname, {headers: {Accept: "text/html"}, cache: "no-store"})
      .then(function (got) {
        if (!got.ok) { throw new Error(got.status); }
        return got.text();
      })
      .then(put)
      .catch(function () {
        live.textContent = "no answer for " + Math.round((Date.now() - since) / 1000) + " s";
        live.className = "old";
      })
      .then(again);
  }
  function again() { setTimeout(ask, EVERY); }
  document.addEventListener("click", function (event) {
    var summary = event.target.closest && event.target.closest("summary");
    if (summary) { chosen[summary.parentNode.id] = !summary.parentNode.open; }
  });
  find.classList.remove("hidden");
  find.addEventListener("input", filter);
  again();
})();
]]

-- A pool of more instances than this is shown closed, unless one of them is not ready.
local OPEN = 24

local function rate(value)
  if not value then
    return "–"
  elseif value == 0 then
    return "0"
  elseif value > 0 and value < 0.05 then
    return "&lt;0.1"
  end
  return string.format(value < 99.95 and "%.1f" or "%.0f", value)
end

local function tile(name, value, class)
  return string.format('<div%s><dt>%s</dt><dd>%s</dd></div>',
                       class and ' class="' .. class .. '"' or "", name, value)
end

-- A cell with a number; `of` is said after it where there is no room for the table's head.
local function cell(value, of, class)
  return string.format('<td class="n%s" data-of="%s">%s</td>', class and " " .. class or "", of,
                       value)
end

local function failures(value)
  return cell(rate(value), "fail/s", value and value > 0 and "bad" or nil)
end

local function tiles(all)
  return '<dl class="tiles">' .. table.concat({
    tile("ready", all.ready .. " of " .. all.size, all.ready < all.size and "bad" or nil),
    tile("in flight", all.in_flight),
    tile("queued", all.queued, all.queued > 0 and "warn" or nil),
    tile("held", all.held, all.held > 0 and "warn" or nil),
    tile("req/s", rate(all.requests)),
    tile("tokens/s", rate(all.tokens)),
    tile("fail/s", rate(all.failures), (all.failures or 0) > 0 and "bad" or nil),
  }) .. "</dl>"
end

local function pool_row(pool, number)
  local aliases = #pool.aliases > 0 and "<small>also " .. escape(table.concat(pool.aliases, ", "))
                  .. "</small>" or ""
  return table.concat({
    '<tr><th scope="row"><a href="#pool-', number, '">', escape(pool.name), "</a>", aliases,
    "</th>",
    cell(pool.ready .. " of " .. pool.size, "ready", pool.ready == 0 and "bad" or nil),
    cell(pool.in_flight, "in flight"),
    cell(pool.queued, "queued", pool.queued == 0 and "none" or nil),
    cell(pool.held, "held", pool.held == 0 and "none" or nil),
    cell(rate(pool.requests), "req/s"),
    cell(rate(pool.tokens), "tokens/s", not pool.tokens and "none" or nil),
    failures(pool.failures), "</tr>\n",
  })
end

local function instance_row(each)
  local id, release, address = escape(each.id), escape(each.release), escape(each.address)
  return table.concat({
    '<tr data-find="', id, " ", release, " ", address, " ", each.state, '">',
    '<td><span class="state ', each.state:match("^%w+"), '">', each.state, "</span></td>",
    '<th scope="row">', id, "</th>",
    cell(each.in_flight, "in flight"), cell(rate(each.requests), "req/s"),
    failures(each.failures),
    '<td class="text wide">', escape(each.vllm_version), "</td>",
    '<td class="text">', release, "</td>",
    '<td class="text wide">', address, ":", each.port, "</td></tr>\n",
  })
end

local function details(pool, number)
  local rows, rest, counts = {}, {}, {}
  local large = #pool.instances > OPEN
  for _, each in ipairs(pool.instances) do
    -- Of many instances those that do not serve come first.
    local list = large and each.state == "ready" and rest or rows
    list[#list + 1] = instance_row(each)
    counts[each.state] = (counts[each.state] or 0) + 1
  end
  local said = {}
  for _, state in ipairs({"ready", "draining", "broken", "not ready"}) do
    if counts[state] then
      said[#said + 1] = counts[state] .. " " .. state
    end
  end
  local open = not large or pool.ready < pool.size
  return string.format(
    '<details id="pool-%d" data-open="%d"%s><summary id="pool-%d-name">%s <span>%s</span>'
    .. '</summary>\n<table class="instances"><thead><tr><th>state</th><th>instance</th>'
    .. '<th class="n">in flight</th><th class="n">req/s</th><th class="n">fail/s</th>'
    .. '<th class="text">vLLM</th><th>release</th><th>address</th></tr></thead>\n<tbody>\n%s'
    .. '</tbody></table></details>\n', number, open and 1 or 0, open and " open" or "", number,
    escape(pool.name), #said > 0 and table.concat(said, ", ") or "no instance",
    table.concat(rows) .. table.concat(rest))
end

-- The page for what status.gather() gives; `nonce` allows our style and script and nothing else.
function M.html(all, nonce)
  local rows, parts = {}, {}
  for i, pool in ipairs(all.pools) do
    rows[i], parts[i] = pool_row(pool, i), details(pool, i)
  end
  local gateway = all.gateway ~= "" and escape(all.gateway) or "gateway"
  local missing = all.size - all.ready
  return table.concat({
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n',
    '<meta name="viewport" content="width=device-width,initial-scale=1">\n',
    '<meta name="color-scheme" content="light dark">\n',
    "<title>", missing > 0 and missing .. " not ready · " or "", gateway, " · vLLM fleet</title>\n",
    '<link rel="icon" href="data:,">\n',
    '<noscript><meta http-equiv="refresh" content="5"></noscript>\n',
    '<style nonce="', nonce, '">', STYLE, "</style></head>\n<body>\n",
    "<header><h1>", gateway, '<small>vLLM fleet gateway</small></h1><span id="live">as of ',
    os.date("!%Y-%m-%d %H:%M:%S UTC", all.time), "</span></header>\n",
    '<div id="state">', tiles(all), "\n<h2>Pools</h2>\n",
    '<div class="sheet"><table><thead><tr><th>pool</th><th class="n">ready</th>',
    '<th class="n">in flight</th><th class="n">queued</th><th class="n">held</th>',
    '<th class="n">req/s</th><th class="n">tokens/s</th><th class="n">fail/s</th>',
    "</tr></thead>\n<tbody>\n", table.concat(rows), "</tbody></table></div>\n",
    "</div>\n<h2>Instances</h2>\n",
    '<input id="find" class="hidden" type="search" placeholder="host, instance, release or state" ',
    'aria-label="Show only instances that have this text">\n',
    '<div id="instances">', table.concat(parts), "</div>\n",
    "<footer>Rates are of the last minute. Held requests wait for a ready instance, queued ones ",
    "for room in their pool. Programs get JSON at the same address.</footer>\n",
    '<script nonce="', nonce, '">', SCRIPT, "</script>\n</body></html>\n",
  })
end

return M
