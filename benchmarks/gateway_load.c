/* The two ends of benchmarks/gateway.py: a backend that is never the bottleneck, and its clients.
 *
 *   gateway_load serve PORT
 *   gateway_load closed PORT CONNECTIONS SECONDS REQUEST
 *   gateway_load streams PORT CONNECTIONS SPREAD_MS REQUEST
 *
 * One thread and one epoll each, on 127.0.0.1. REQUEST is a file with one whole HTTP request.
 *
 * `serve` reads every request to its end and answers a chat completion; GET is answered with a
 * list of one model, whatever the path, which is what health checks want. A short body with
 * "stream": true gets "max_tokens" chunks as server-sent events, "seed" milliseconds apart; each
 * holds the clock at which it was written: t=NANOSECONDS.
 *
 * `closed` keeps one request in flight on each connection, ends what it began before SECONDS were
 * over, and prints latencies, send to last byte.
 * `streams` opens its connections evenly over SPREAD_MS, one streamed request on each, and prints
 * how long each chunk took from the backend's write to this client's read, and by how much the
 * gap between two chunks grew or shrank on the way. Both print one JSON object.
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FDS = 16384, HEAD = 65536, READ = 262144, SHORT_BODY = 4096, PATIENCE_MS = 30000 };

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static struct sockaddr_in loopback(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static void quick(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

/* The value of a header, or NULL; `head` ends with an empty line and a 0 byte. */
static const char *header(const char *head, const char *name) {
    size_t length = strlen(name);
    for (const char *line = strstr(head, "\r\n"); line; line = strstr(line, "\r\n")) {
        line += 2;
        if (!strncasecmp(line, name, length) && line[length] == ':') {
            const char *value = line + length + 1;
            while (*value == ' ')
                value++;
            return value;
        }
    }
    return NULL;
}

/* Follows the chunked coding over any split of the bytes. */
struct chunked {
    enum { SIZE, EXTENSION, DATA, DATA_END, TRAILER, TRAILER_LINE, DONE } at;
    uint64_t left;
};

/* Bytes of `data` that belong to the coding; stops behind its end. */
static size_t chunked_eat(struct chunked *c, const char *data, size_t size) {
    size_t i = 0;
    while (i < size && c->at != DONE) {
        char b = data[i];
        switch (c->at) {
        case SIZE:
            if (b == '\n')
                c->at = c->left ? DATA : TRAILER;
            else if (b == ';')
                c->at = EXTENSION;
            else if (b != '\r')
                c->left = c->left * 16 + (uint64_t)(b <= '9' ? b - '0' : (b | 32) - 'a' + 10);
            i++;
            break;
        case EXTENSION:
            if (b == '\n')
                c->at = c->left ? DATA : TRAILER;
            i++;
            break;
        case DATA: {
            size_t take = size - i < c->left ? size - i : c->left;
            i += take;
            c->left -= take;
            if (!c->left)
                c->at = DATA_END;
            break;
        }
        case DATA_END:
            if (b == '\n')
                c->at = SIZE;
            i++;
            break;
        case TRAILER:
            if (b == '\n')
                c->at = DONE;
            else if (b != '\r')
                c->at = TRAILER_LINE;
            i++;
            break;
        case TRAILER_LINE:
            if (b == '\n')
                c->at = TRAILER;
            i++;
            break;
        case DONE:
            break;
        }
    }
    return i;
}

/* One HTTP message as it arrives: head, then a body by length, by chunks, or to the end. */
struct message {
    char head[HEAD + 1];
    size_t head_size;
    bool body;
    bool is_chunked, to_end;
    struct chunked chunked;
    uint64_t left;
    char text[SHORT_BODY + 1]; /* the body's first bytes as sent, for `serve` */
    size_t text_size;
};

static void message_reset(struct message *m) {
    m->head_size = m->text_size = 0;
    m->body = m->is_chunked = m->to_end = false;
    m->left = 0;
    memset(&m->chunked, 0, sizeof m->chunked);
}

/* Takes bytes in; sets *done at the message's end. Returns how many belong to it. */
static size_t message_eat(struct message *m, const char *data, size_t size, bool answer,
                          bool *done) {
    size_t used = 0;
    *done = false;
    if (!m->body) {
        size_t before = m->head_size;
        size_t take = size < HEAD - before ? size : HEAD - before;
        memcpy(m->head + before, data, take);
        m->head[before + take] = 0;
        size_t from = before > 3 ? before - 3 : 0;
        char *end = memmem(m->head + from, before + take - from, "\r\n\r\n", 4);
        if (!end) {
            m->head_size += take;
            if (m->head_size == HEAD) {
                fprintf(stderr, "a head of over %d bytes\n", HEAD);
                exit(1);
            }
            return take;
        }
        m->head_size = (size_t)(end + 4 - m->head);
        m->head[m->head_size] = 0;
        used = m->head_size - before;
        m->body = true;
        const char *length = header(m->head, "Content-Length");
        const char *coding = header(m->head, "Transfer-Encoding");
        m->is_chunked = coding && !strncasecmp(coding, "chunked", 7);
        m->left = length ? strtoull(length, NULL, 10) : 0;
        m->to_end = answer && !length && !m->is_chunked;
    }
    size_t eaten;
    if (m->is_chunked)
        eaten = chunked_eat(&m->chunked, data + used, size - used);
    else if (m->to_end)
        eaten = size - used;
    else {
        eaten = size - used < m->left ? size - used : m->left;
        m->left -= eaten;
    }
    size_t room = SHORT_BODY - m->text_size;
    size_t keep = eaten < room ? eaten : room;
    memcpy(m->text + m->text_size, data + used, keep);
    m->text_size += keep;
    m->text[m->text_size] = 0;
    *done = m->is_chunked ? m->chunked.at == DONE : !m->to_end && m->left == 0;
    return used + eaten;
}

/* serve */

struct server_end {
    int fd;
    struct message request;
    bool streaming;
    long chunks_left;
    int64_t gap, due;
};

static struct server_end *ends[MAX_FDS];
static int streaming[MAX_FDS], streams;

static void server_close(struct server_end *end) {
    for (int i = 0; i < streams; i++)
        if (streaming[i] == end->fd)
            streaming[i--] = streaming[--streams];
    close(end->fd);
    ends[end->fd] = NULL;
    free(end);
}

/* Small answers into an empty socket buffer: what does not fit at once is a broken benchmark. */
static void put(int fd, const char *text, size_t size) {
    if (send(fd, text, size, MSG_NOSIGNAL) != (ssize_t)size && errno != EPIPE &&
        errno != ECONNRESET)
        fprintf(stderr, "serve: a short write: %s\n", strerror(errno));
}

static long number(const char *text, const char *key, long otherwise) {
    const char *at = strstr(text, key);
    if (!at)
        return otherwise;
    at += strlen(key);
    while (*at == ' ' || *at == ':')
        at++;
    return strtol(at, NULL, 10);
}

static void event(int fd, const char *format, ...) {
    char data[512], chunk[640];
    va_list args;
    va_start(args, format);
    int size = vsnprintf(data, sizeof data, format, args);
    va_end(args);
    int all = snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n", (unsigned)size, data);
    put(fd, chunk, (size_t)all);
}

static void stream_step(struct server_end *end) {
    event(end->fd,
          "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,"
          "\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"t=%lld \"},"
          "\"finish_reason\":%s}]}\n\n",
          (long long)now_ns(), end->chunks_left == 1 ? "\"stop\"" : "null");
    if (--end->chunks_left > 0)
        return;
    event(end->fd, "data: [DONE]\n\n");
    put(end->fd, "0\r\n\r\n", 5);
    end->streaming = false;
    for (int i = 0; i < streams; i++)
        if (streaming[i] == end->fd)
            streaming[i--] = streaming[--streams];
}

static void respond(struct server_end *end) {
    static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":"
                                 "\"model\",\"created\":1,\"owned_by\":\"vllm\"}]}";
    static const char chat[] =
        "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\","
        "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"Hello.\"},"
        "\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":9,"
        "\"completion_tokens\":2,\"total_tokens\":11}}";
    const char *text = end->request.text;
    bool get = !strncmp(end->request.head, "GET ", 4);
    if (!get && (strstr(text, "\"stream\":true") || strstr(text, "\"stream\": true"))) {
        static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                                   "Transfer-Encoding: chunked\r\n\r\n";
        put(end->fd, head, sizeof head - 1);
        end->streaming = true;
        end->chunks_left = number(text, "\"max_tokens\"", 10);
        end->gap = number(text, "\"seed\"", 10) * 1000000LL;
        end->due = now_ns() + end->gap;
        streaming[streams++] = end->fd;
        stream_step(end);
        return;
    }
    char answer[1024];
    const char *body = get ? models : chat;
    int size = snprintf(answer, sizeof answer,
                        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                        "Content-Length: %zu\r\n\r\n%s",
                        strlen(body), body);
    put(end->fd, answer, (size_t)size);
}

static void server_read(struct server_end *end) {
    static char data[READ];
    ssize_t got = recv(end->fd, data, sizeof data, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got <= 0) {
        server_close(end);
        return;
    }
    for (size_t at = 0; at < (size_t)got;) {
        bool done;
        at += message_eat(&end->request, data + at, (size_t)got - at, false, &done);
        if (done) {
            respond(end);
            message_reset(&end->request);
        }
    }
}

static void serve(int port) {
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = loopback(port);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4096))
        die("listen");
    int poll = epoll_create1(0);
    struct epoll_event wanted = {.events = EPOLLIN, .data.fd = listener}, got[256];
    epoll_ctl(poll, EPOLL_CTL_ADD, listener, &wanted);
    printf("serving\n");
    fflush(stdout);
    for (;;) {
        int64_t next = INT64_MAX, now = now_ns();
        for (int i = 0; i < streams; i++)
            if (ends[streaming[i]]->due < next)
                next = ends[streaming[i]]->due;
        int wait = next == INT64_MAX ? -1 : next <= now ? 0 : (int)((next - now) / 1000000) + 1;
        int count = epoll_wait(poll, got, 256, wait);
        for (int i = 0; i < count; i++) {
            int fd = got[i].data.fd;
            if (fd != listener) {
                if (ends[fd])
                    server_read(ends[fd]);
                continue;
            }
            int client;
            while ((client = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                if (client >= MAX_FDS)
                    die("too many connections");
                quick(client);
                ends[client] = malloc(sizeof **ends);
                memset(ends[client], 0, sizeof **ends);
                ends[client]->fd = client;
                wanted = (struct epoll_event){.events = EPOLLIN, .data.fd = client};
                epoll_ctl(poll, EPOLL_CTL_ADD, client, &wanted);
            }
        }
        now = now_ns();
        for (int i = streams - 1; i >= 0; i--) {
            struct server_end *end = ends[streaming[i]];
            if (end->due <= now) {
                end->due += end->gap;
                stream_step(end);
            }
        }
    }
}

/* clients */

struct client_end {
    int fd;
    size_t sent;
    int64_t began;
    struct message answer;
    /* streams */
    char carry[64];
    size_t carried;
    int64_t last_written, last_read;
    bool finished;
};

static char *request;
static size_t request_size;
static int port_asked;
static long requests, errors;
static char first_error[256];

struct figures {
    int64_t *values;
    size_t count, room;
};

static void note(struct figures *f, int64_t value) {
    if (f->count == f->room) {
        f->room = f->room ? f->room * 2 : 65536;
        f->values = realloc(f->values, f->room * sizeof *f->values);
    }
    f->values[f->count++] = value;
}

static int by_value(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static double share(const struct figures *f, double part) {
    if (!f->count)
        return 0;
    size_t at = (size_t)(part * (double)f->count);
    return (double)f->values[at < f->count ? at : f->count - 1] / 1000;
}

static void sort(struct figures *f) {
    if (f->count)
        qsort(f->values, f->count, sizeof *f->values, by_value);
}

static void failed(struct client_end *end, const char *why) {
    errors++;
    if (!*first_error) {
        snprintf(first_error, sizeof first_error, "%s: %.120s", why,
                 end->answer.head_size ? end->answer.head : "no answer");
        for (char *c = first_error; *c; c++)
            if (*c < 32 || *c == '"' || *c == '\\')
                *c = ' ';
    }
}

static void open_end(struct client_end *end, int poll) {
    end->fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = loopback(port_asked);
    if (end->fd < 0 || connect(end->fd, (struct sockaddr *)&address, sizeof address))
        die("connect");
    fcntl(end->fd, F_SETFL, O_NONBLOCK);
    quick(end->fd);
    struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = end};
    epoll_ctl(poll, EPOLL_CTL_ADD, end->fd, &wanted);
}

static void reopen(struct client_end *end, int poll) {
    close(end->fd);
    open_end(end, poll);
}

/* Sends what fits; waits for room only where something is left. */
static void push(struct client_end *end, int poll) {
    while (end->sent < request_size) {
        ssize_t put = send(end->fd, request + end->sent, request_size - end->sent, MSG_NOSIGNAL);
        if (put < 0)
            break;
        end->sent += (size_t)put;
    }
    bool more = end->sent < request_size;
    struct epoll_event wanted = {.events = EPOLLIN | (more ? EPOLLOUT : 0), .data.ptr = end};
    epoll_ctl(poll, EPOLL_CTL_MOD, end->fd, &wanted);
}

static void begin(struct client_end *end, int poll) {
    message_reset(&end->answer);
    end->sent = 0;
    end->began = now_ns();
    push(end, poll);
}

static bool good(const struct client_end *end) {
    return end->answer.head_size > 12 && !strncmp(end->answer.head + 9, "200", 3);
}

static int closed(int connections, double seconds) {
    struct figures latency = {0};
    struct client_end *all = calloc((size_t)connections, sizeof *all);
    int poll = epoll_create1(0);
    struct epoll_event got[256];
    static char data[READ];
    for (int i = 0; i < connections; i++) {
        open_end(&all[i], poll);
        begin(&all[i], poll);
    }
    int64_t start = now_ns(), stop = start + (int64_t)(seconds * 1e9), now = start;
    int in_flight = connections;
    while (in_flight && errors < 100) {
        int count = epoll_wait(poll, got, 256, PATIENCE_MS);
        if (!count) {
            snprintf(first_error, sizeof first_error, "no answer within %d s", PATIENCE_MS / 1000);
            errors += in_flight;
            break;
        }
        for (int i = 0; i < count; i++) {
            struct client_end *end = got[i].data.ptr;
            if (got[i].events & EPOLLOUT)
                push(end, poll);
            if (!(got[i].events & ~(uint32_t)EPOLLOUT))
                continue;
            ssize_t size = recv(end->fd, data, sizeof data, 0);
            if (size < 0 && (errno == EAGAIN || errno == EINTR))
                continue;
            bool done = false, ended = size <= 0;
            if (ended)
                done = end->answer.to_end && end->answer.body;
            else
                message_eat(&end->answer, data, (size_t)size, true, &done);
            if (!done && !ended)
                continue;
            if (!done)
                failed(end, "closed before the answer's end");
            else if (!good(end))
                failed(end, "not 200");
            else {
                note(&latency, now_ns() - end->began);
                requests++;
            }
            if (now_ns() >= stop) { /* what was begun is waited for: nothing is left to the next */
                close(end->fd);
                in_flight--;
                continue;
            }
            const char *connection = done ? header(end->answer.head, "Connection") : NULL;
            if (ended || (connection && !strncasecmp(connection, "close", 5)))
                reopen(end, poll);
            begin(end, poll);
        }
        now = now_ns();
    }
    sort(&latency);
    printf("{\"requests\":%ld,\"errors\":%ld,\"error\":\"%s\",\"seconds\":%.3f,\"p50_us\":%.1f,"
           "\"p99_us\":%.1f}\n",
           requests, errors, first_error, (double)(now - start) / 1e9, share(&latency, .5),
           share(&latency, .99));
    return 0;
}

/* Finds t=NANOSECONDS in a stream's bytes, also where two reads share one. */
static void stamps(struct client_end *end, const char *data, size_t size, int64_t read,
                   struct figures *delay, struct figures *stretch) {
    static char text[READ + 64];
    memcpy(text, end->carry, end->carried);
    memcpy(text + end->carried, data, size);
    size_t all = end->carried + size;
    text[all] = 0;
    char *at = text;
    end->carried = 0;
    for (;;) {
        char *found = memmem(at, all - (size_t)(at - text), "\"t=", 3);
        if (!found)
            break;
        char *stop = found + 3;
        int64_t written = 0;
        while (*stop >= '0' && *stop <= '9')
            written = written * 10 + (*stop++ - '0');
        if (!*stop) { /* goes on in the next read */
            at = found;
            break;
        }
        requests++;
        if (end->last_written) { /* the first chunk's delay is the request's, not a chunk's */
            note(delay, read - written);
            int64_t grew = (read - end->last_read) - (written - end->last_written);
            note(stretch, grew < 0 ? -grew : grew);
        }
        end->last_written = written;
        end->last_read = read;
        at = stop;
    }
    size_t left = all - (size_t)(at - text);
    size_t keep = left;
    if (strncmp(at, "\"t=", 3))
        keep = left < 2 ? left : 2; /* a stamp's first letters at most */
    if (keep > sizeof end->carry)
        keep = sizeof end->carry;
    memcpy(end->carry, text + all - keep, keep);
    end->carried = keep;
}

static int streams_client(int connections, double spread_ms) {
    struct figures delay = {0}, stretch = {0};
    struct client_end *all = calloc((size_t)connections, sizeof *all);
    int poll = epoll_create1(0), opened = 0, open_now = 0;
    struct epoll_event got[256];
    static char data[READ];
    int64_t start = now_ns();
    while (opened < connections || open_now) {
        int64_t due = start + (int64_t)(spread_ms * 1e6 * opened / connections), now = now_ns();
        if (opened < connections && due <= now) {
            struct client_end *end = &all[opened++];
            open_now++;
            open_end(end, poll);
            begin(end, poll);
            continue;
        }
        int wait = opened < connections ? (int)((due - now) / 1000000) : PATIENCE_MS;
        int count = epoll_wait(poll, got, 256, wait);
        if (!count && opened == connections) {
            snprintf(first_error, sizeof first_error, "nothing came for %d s", PATIENCE_MS / 1000);
            errors += open_now;
            break;
        }
        for (int i = 0; i < count; i++) {
            struct client_end *end = got[i].data.ptr;
            if (got[i].events & EPOLLOUT)
                push(end, poll);
            if (!(got[i].events & ~(uint32_t)EPOLLOUT))
                continue;
            ssize_t size = recv(end->fd, data, sizeof data, 0);
            int64_t read = now_ns();
            if (size < 0 && (errno == EAGAIN || errno == EINTR))
                continue;
            bool done = false;
            if (size > 0) {
                stamps(end, data, (size_t)size, read, &delay, &stretch);
                message_eat(&end->answer, data, (size_t)size, true, &done);
            } else
                done = end->answer.to_end && end->answer.body;
            if (size > 0 && !done)
                continue;
            if (!done)
                failed(end, "closed before the stream's end");
            else if (!good(end))
                failed(end, "not 200");
            close(end->fd);
            open_now--;
        }
    }
    sort(&delay);
    sort(&stretch);
    printf("{\"chunks\":%ld,\"errors\":%ld,\"error\":\"%s\",\"seconds\":%.3f,\"p50_us\":%.1f,"
           "\"p99_us\":%.1f,\"max_us\":%.1f,\"stretch_p99_us\":%.1f}\n",
           requests, errors, first_error, (double)(now_ns() - start) / 1e9, share(&delay, .5),
           share(&delay, .99), share(&delay, 1), share(&stretch, .99));
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "serve"))
        serve(atoi(argv[2]));
    bool is_closed = argc == 6 && !strcmp(argv[1], "closed");
    if (!is_closed && !(argc == 6 && !strcmp(argv[1], "streams"))) {
        fprintf(stderr, "usage: gateway_load serve PORT | closed PORT CONNECTIONS SECONDS REQUEST"
                        " | streams PORT CONNECTIONS SPREAD_MS REQUEST\n");
        return 2;
    }
    FILE *file = fopen(argv[5], "rb");
    if (!file)
        die(argv[5]);
    fseek(file, 0, SEEK_END);
    request_size = (size_t)ftell(file);
    rewind(file);
    request = malloc(request_size);
    if (fread(request, 1, request_size, file) != request_size)
        die(argv[5]);
    fclose(file);
    port_asked = atoi(argv[2]);
    int connections = atoi(argv[3]);
    return is_closed ? closed(connections, atof(argv[4])) : streams_client(connections,
                                                                           atof(argv[4]));
}
