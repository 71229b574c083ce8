/* Records to bytes (format v2), one after the other, in the order of the runs: see encoder.py, whose numpy form gives
 * the same bytes and stands in where this is not compiled.
 *
 * Knows buffers alone: Arrow's 32-bit offsets, data and validity bits. Holds no state but its type, and not the GIL while
 * it works. Every length is checked against the buffers before it is used; what does not fit is a ValueError, never a
 * write.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const int32_t *offsets; /* rows + 1 */
    const uint8_t *data;
    int64_t data_size;
    const uint8_t *valid; /* bits, or NULL where nothing is null */
    int64_t valid_from;   /* the bit of row 0 */
} column;

static inline uint64_t zigzag(int64_t number) { return ((uint64_t)number << 1) ^ (uint64_t)(number >> 63); }

static inline int64_t width(uint64_t zigzagged)
{
    int64_t bytes = 1;
    while (zigzagged >>= 7)
        bytes++;
    return bytes;
}

static inline uint8_t *put(uint8_t *at, uint64_t zigzagged)
{
    while (zigzagged >= 0x80) {
        *at++ = (uint8_t)(zigzagged | 0x80);
        zigzagged >>= 7;
    }
    *at++ = (uint8_t)zigzagged;
    return at;
}

/* The value's length, -1 for a null, -2 where the offsets do not fit the data. */
static inline int64_t length_of(const column *from, int64_t row)
{
    if (from->valid != NULL) {
        int64_t bit = from->valid_from + row;
        if (!(from->valid[bit >> 3] >> (bit & 7) & 1))
            return -1;
    }
    int64_t start = from->offsets[row], end = from->offsets[row + 1];
    return start < 0 || end < start || end > from->data_size ? -2 : end - start;
}

static inline uint8_t *put_bytes(uint8_t *at, const column *from, int64_t row, int64_t length)
{
    at = put(at, zigzag(length));
    if (length > 0) {
        memcpy(at, from->data + from->offsets[row], (size_t)length);
        at += length;
    }
    return at;
}

typedef struct {
    const int64_t *order; /* the row at each place, or NULL: the place itself */
    const int64_t *times; /* by place, or NULL: `now` everywhere */
    const int64_t *counts; /* headers by row, or NULL: none anywhere */
    int64_t now, rows, places;
    int has_key, has_value;
    column key, value, headers;
} records;

/* A block is new each time, so rows come from slow memory and go to it, and most of the time is waiting for that. What
 * the processor does not see by itself it is told of: where the next rows of a partition lie, and beyond the end of a page.
 * The telling stands in the loop itself, for GCC takes a function that does nothing else for one without effect. */
#ifdef __GNUC__
#define FETCH(address, to_write) __builtin_prefetch((const void *)(address), to_write)
#else
#define FETCH(address, to_write) ((void)(address))
#endif
enum { PLACES_AHEAD = 6, BYTES_AHEAD = 1024, LINE = 64 };

static inline uintptr_t address_of(const column *from, int64_t row)
{
    return from->offsets == NULL ? 0 : (uintptr_t)from->data + (uintptr_t)from->offsets[row];
}

/* Returns the end of what was written, or NULL where something does not fit. */
static uint8_t *put_run(const records *of, const int64_t run[4], uint8_t *at, const uint8_t *end)
{
    for (int64_t place = run[0]; place < run[1]; place++) {
        int64_t row = of->order == NULL ? place : of->order[place];
        if (row < 0 || row >= of->rows)
            return NULL;
        if (of->order == NULL) {
            uintptr_t value = address_of(&of->value, row) + BYTES_AHEAD;
            FETCH(value, 0);
            FETCH(value + LINE, 0);
            FETCH((uintptr_t)at + BYTES_AHEAD, 1);
            FETCH((uintptr_t)at + BYTES_AHEAD + LINE, 1);
        } else if (place + PLACES_AHEAD < of->places) {
            int64_t next = of->order[place + PLACES_AHEAD];
            if (next >= 0 && next < of->rows) {
                uintptr_t value = address_of(&of->value, next);
                FETCH(value, 0);
                FETCH(value + LINE, 0);
                FETCH(value + 2 * LINE, 0);
                FETCH(address_of(&of->key, next), 0);
            }
        }
        uint64_t offset = zigzag(run[2] + place - run[0]);
        uint64_t time = zigzag((int64_t)((uint64_t)(of->times == NULL ? of->now : of->times[place]) - (uint64_t)run[3]));
        int64_t key = of->has_key ? length_of(&of->key, row) : -1;
        int64_t value = of->has_value ? length_of(&of->value, row) : -1;
        int64_t count = 0, headers = 0;
        if (of->counts != NULL) {
            count = of->counts[row];
            headers = length_of(&of->headers, row);
            if (headers == -1)
                headers = 0;
        }
        if (key == -2 || value == -2 || headers == -2)
            return NULL;
        int64_t body = 1 + width(time) + width(offset) + width(zigzag(key)) + (key > 0 ? key : 0)
                       + width(zigzag(value)) + (value > 0 ? value : 0) + width(zigzag(count)) + headers;
        if (end - at < body + 10)
            return NULL;
        at = put(at, zigzag(body));
        *at++ = 0; /* attributes */
        at = put(at, time);
        at = put(at, offset);
        at = key < 0 ? put(at, zigzag(-1)) : put_bytes(at, &of->key, row, key);
        at = value < 0 ? put(at, zigzag(-1)) : put_bytes(at, &of->value, row, value);
        at = put(at, zigzag(count));
        if (headers > 0) {
            memcpy(at, of->headers.data + of->headers.offsets[row], (size_t)headers);
            at += headers;
        }
    }
    return at;
}

/* Kafka's hash of a key (org.apache.kafka.common.utils.Utils.murmur2). */
static uint32_t murmur2(const uint8_t *key, int64_t length)
{
    const uint32_t m = 0x5BD1E995;
    uint32_t hash = 0x9747B28C ^ (uint32_t)length, word;
    for (; length >= 4; key += 4, length -= 4) {
        word = (key[0] | (uint32_t)key[1] << 8 | (uint32_t)key[2] << 16 | (uint32_t)key[3] << 24) * m;
        hash = hash * m ^ (word ^ word >> 24) * m;
    }
    if (length > 0) {
        for (word = 0; length > 0; length--)
            word = word << 8 | key[length - 1];
        hash = (hash ^ word) * m;
    }
    hash = (hash ^ hash >> 13) * m;
    return hash ^ hash >> 15;
}

/* ---- The fingerprint of records: see fingerprint.py, whose numpy form gives the same number. -------------------------- */

static const uint64_t STEP = 0x9E3779B97F4A7C15;
static const uint64_t SALTS[] = {0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89,
                                 0x452821E638D01377, 0xBE5466CF34E90C6C, 0xC0AC29B7C97C50DD, 0x3F84D5B5B5470917,
                                 0x9216D5D98979FB1B, 0xD1310BA698DFB5AC, 0x2FFD72DBD01ADFB7, 0xB8E1AFED6A267E96};

/* Both halves of the product of 128 bits, as in wyhash. */
static inline uint64_t mixed(uint64_t a, uint64_t b)
{
#ifdef __SIZEOF_INT128__
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    uint64_t low = (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF), up = (a & 0xFFFFFFFF) * (b >> 32);
    uint64_t down = (a >> 32) * (b & 0xFFFFFFFF), high = (a >> 32) * (b >> 32);
    uint64_t middle = (low >> 32) + (up & 0xFFFFFFFF) + down;
    return a * b ^ (high + (up >> 32) + (middle >> 32));
#endif
}

static inline uint64_t word_at(const uint8_t *at)
{
    return (uint64_t)at[0] | (uint64_t)at[1] << 8 | (uint64_t)at[2] << 16 | (uint64_t)at[3] << 24
           | (uint64_t)at[4] << 32 | (uint64_t)at[5] << 40 | (uint64_t)at[6] << 48 | (uint64_t)at[7] << 56;
}

/* `length` is -1 for a null, for which no byte is read. */
static inline uint64_t digest(const uint8_t *at, int64_t length)
{
    uint64_t sum = 0, step = 0;
    int64_t left = length;
    for (; left >= 16; at += 16, left -= 16, step += STEP)
        sum += mixed(word_at(at) ^ (SALTS[0] + step), word_at(at + 8) ^ (SALTS[1] + step));
    if (left > 0) {
        uint64_t first = 0, second = 0;
        for (int64_t index = 0; index < left; index++) {
            uint64_t octet = (uint64_t)at[index] << (8 * (index & 7));
            if (index < 8)
                first |= octet;
            else
                second |= octet;
        }
        sum += mixed(first ^ (SALTS[0] + step), second ^ (SALTS[1] + step));
    }
    return sum + (uint64_t)length * SALTS[2];
}

static inline uint64_t digest_of(const column *from, int64_t row, int64_t length)
{
    return digest(length > 0 ? from->data + from->offsets[row] : NULL, length);
}

typedef struct {
    int64_t rows, headers_rows;
    int has_key, has_value;
    const int32_t *bounds;     /* of the headers of each row, rows + 1; or NULL: none anywhere */
    const int64_t *times;      /* -1: none given; or NULL: none anywhere */
    const int32_t *partitions; /* likewise */
    column key, value, names, contents;
} prints;

/* Whether every length fits; the sum is added to `sum`. */
static int add_prints(const prints *of, uint64_t topic, uint64_t *sum)
{
    for (int64_t row = 0; row < of->rows; row++) {
        int64_t key = of->has_key ? length_of(&of->key, row) : -1;
        int64_t value = of->has_value ? length_of(&of->value, row) : -1;
        if (key == -2 || value == -2)
            return 0;
        uint64_t body = mixed(digest_of(&of->key, row, key) ^ SALTS[3], digest_of(&of->value, row, value) ^ SALTS[4]);
        uint64_t time = of->times == NULL ? (uint64_t)-1 : (uint64_t)of->times[row];
        uint64_t partition = of->partitions == NULL ? (uint64_t)-1 : (uint64_t)(int64_t)of->partitions[row];
        uint64_t place = mixed(time ^ SALTS[5], partition ^ SALTS[6]);
        if (of->bounds != NULL) {
            int64_t first = of->bounds[row], end = of->bounds[row + 1];
            if (first < 0 || end < first || end > of->headers_rows)
                return 0;
            uint64_t step = STEP;
            for (int64_t header = first; header < end; header++, step += STEP) {
                int64_t name = length_of(&of->names, header), content = length_of(&of->contents, header);
                if (name == -2 || content == -2)
                    return 0;
                uint64_t pair = mixed(digest_of(&of->names, header, name) ^ SALTS[7],
                                      digest_of(&of->contents, header, content) ^ SALTS[8]);
                place += mixed(pair ^ SALTS[9], step ^ SALTS[10]);
            }
        }
        *sum += mixed(body ^ topic, place ^ SALTS[11]);
    }
    return 1;
}

/* ---- Python's side: chunks out ---------------------------------------------------------------------------------- */

/* The bytes of a run, for reading. A slice of a memoryview would be three times the work to make and to give back: a
 * block of a thousand partitions has a thousand of them. */
typedef struct {
    PyObject_HEAD
    PyObject *block; /* a memoryview of `out`, which cannot be moved or freed while that lives */
    uint8_t *start;
    Py_ssize_t size;
} chunk;

static void chunk_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(((chunk *)self)->block);
    PyObject_Free(self);
    Py_DECREF(type);
}

static Py_ssize_t chunk_length(PyObject *self) { return ((chunk *)self)->size; }

static int chunk_buffer(PyObject *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, self, ((chunk *)self)->start, ((chunk *)self)->size, 1, flags);
}

static PyType_Slot chunk_slots[] = {
    {Py_tp_doc, "The bytes of a run; keeps those of its whole block. To be had from encode."},
    {Py_tp_dealloc, chunk_dealloc},
    {Py_sq_length, chunk_length},
    {Py_bf_getbuffer, chunk_buffer},
    {0, NULL},
};

static PyType_Spec chunk_spec = {"spark_kafka_sink.record._kernel.Chunk", sizeof(chunk), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, chunk_slots};

typedef struct {
    PyTypeObject *chunk_type;
} state;

/* A list of one chunk for each run; `ends`: where it ends, counted from `start`. */
static PyObject *chunks_of(PyTypeObject *type, PyObject *out, uint8_t *start, const int64_t *ends, int64_t runs)
{
    PyObject *block = PyMemoryView_FromObject(out);
    PyObject *made = block == NULL ? NULL : PyList_New((Py_ssize_t)runs);
    int64_t begin = 0;
    for (int64_t index = 0; index < runs && made != NULL; index++) {
        chunk *of_run = PyObject_New(chunk, type);
        if (of_run == NULL) {
            Py_CLEAR(made);
            break;
        }
        Py_INCREF(block);
        of_run->block = block;
        of_run->start = start + begin;
        of_run->size = (Py_ssize_t)(ends[index] - begin);
        begin = ends[index];
        PyList_SetItem(made, (Py_ssize_t)index, (PyObject *)of_run);
    }
    Py_XDECREF(block);
    return made;
}

/* ---- Python's side: buffers in, checked ------------------------------------------------------------------------- */

enum { ORDER, TIMES, COUNTS, RUNS, OUT, COLUMNS, VIEWS = COLUMNS + 9 };
static const int64_t MOST = (int64_t)1 << 59; /* so many of anything, in bytes, are a number still */

/* A view of `object`'s bytes, empty for None. */
static int view_of(PyObject *object, Py_buffer *view, int flags)
{
    if (object == Py_None) {
        memset(view, 0, sizeof *view);
        return 0;
    }
    return PyObject_GetBuffer(object, view, flags);
}

static int wants(const Py_buffer *view, int64_t bytes, const char *name)
{
    if (view->buf != NULL && view->len < bytes) {
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes, less than %lld", name, view->len, (long long)bytes);
        return 0;
    }
    return 1;
}

static int column_of(Py_buffer views[3], int64_t valid_from, int64_t rows, column *made, const char *name)
{
    if (!wants(&views[0], 4 * (rows + 1), name) || !wants(&views[2], (valid_from + rows + 7) / 8, name))
        return 0;
    made->offsets = views[0].buf;
    made->data = views[1].buf;
    made->data_size = views[1].len;
    made->valid = views[2].buf;
    made->valid_from = valid_from;
    return 1;
}

static PyObject *encode(PyObject *module, PyObject *arguments)
{
    PyObject *given[VIEWS];
    long long rows, now, key_from, value_from;
    if (!PyArg_ParseTuple(
            arguments, "LLOOOOO(OOOL)(OOOL)(OO)", &rows, &now, &given[ORDER], &given[TIMES], &given[COUNTS],
            &given[RUNS], &given[OUT], &given[COLUMNS], &given[COLUMNS + 1], &given[COLUMNS + 2], &key_from,
            &given[COLUMNS + 3], &given[COLUMNS + 4], &given[COLUMNS + 5], &value_from, &given[COLUMNS + 6],
            &given[COLUMNS + 7]))
        return NULL;
    given[COLUMNS + 8] = Py_None; /* headers are never null */
    Py_buffer views[VIEWS];
    int taken = 0;
    PyObject *result = NULL;
    int64_t *ends = NULL;
    for (; taken < VIEWS; taken++) {
        int flags = taken == OUT ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (view_of(given[taken], &views[taken], flags) < 0)
            goto release;
    }
    int64_t runs = views[RUNS].len / 32, places = 0;
    const int64_t *run = views[RUNS].buf;
    for (int64_t index = 0; index < runs; index++) {
        if (run[4 * index] < places || run[4 * index + 1] < run[4 * index]) {
            PyErr_SetString(PyExc_ValueError, "runs must ascend without overlap");
            goto release;
        }
        places = run[4 * index + 1];
    }
    if (places > MOST || rows < 0 || rows > MOST || key_from < 0 || key_from > MOST || value_from < 0 || value_from > MOST) {
        PyErr_SetString(PyExc_ValueError, "a number of rows is out of bounds");
        goto release;
    }
    records of = {.order = views[ORDER].buf, .times = views[TIMES].buf, .counts = views[COUNTS].buf, .now = now,
                  .rows = rows, .places = places, .has_key = views[COLUMNS].buf != NULL,
                  .has_value = views[COLUMNS + 3].buf != NULL};
    if (of.order == NULL && places > rows) {
        PyErr_SetString(PyExc_ValueError, "runs go past the last row");
        goto release;
    }
    if (!wants(&views[ORDER], 8 * places, "order") || !wants(&views[TIMES], 8 * places, "times")
        || !wants(&views[COUNTS], 8 * rows, "counts")
        || !column_of(&views[COLUMNS], key_from, rows, &of.key, "key")
        || !column_of(&views[COLUMNS + 3], value_from, rows, &of.value, "value")
        || !column_of(&views[COLUMNS + 6], 0, rows, &of.headers, "headers"))
        goto release;
    ends = PyMem_Calloc((size_t)runs, sizeof *ends);
    if (ends == NULL) {
        PyErr_NoMemory();
        goto release;
    }
    uint8_t *start = views[OUT].buf, *at = start;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t index = 0; index < runs && at != NULL; index++) {
        at = put_run(&of, run + 4 * index, at, start + views[OUT].len);
        if (at != NULL)
            ends[index] = at - start;
    }
    Py_END_ALLOW_THREADS
    if (at == NULL)
        PyErr_SetString(PyExc_ValueError, "a row, a length or the room for the records is out of bounds");
    else
        result = chunks_of(((state *)PyModule_GetState(module))->chunk_type, given[OUT], start, ends, runs);
release:
    PyMem_Free(ends);
    while (taken-- > 0)
        if (views[taken].obj != NULL)
            PyBuffer_Release(&views[taken]);
    return result;
}

static PyObject *hash(PyObject *module, PyObject *arguments)
{
    PyObject *given[3];
    if (!PyArg_ParseTuple(arguments, "OOO", &given[0], &given[1], &given[2]))
        return NULL;
    Py_buffer views[3];
    int taken = 0;
    PyObject *result = NULL;
    for (; taken < 3; taken++)
        if (PyObject_GetBuffer(given[taken], &views[taken], taken == 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            goto release;
    int64_t rows = views[2].len / 4, row = 0;
    column keys = {.offsets = views[0].buf, .data = views[1].buf, .data_size = views[1].len};
    if (!wants(&views[0], 4 * (rows + 1), "key"))
        goto release;
    Py_BEGIN_ALLOW_THREADS
    for (uint32_t *hashed = views[2].buf; row < rows; row++) {
        int64_t length = length_of(&keys, row);
        if (length < 0)
            break;
        hashed[row] = murmur2(keys.data + keys.offsets[row], length);
    }
    Py_END_ALLOW_THREADS
    if (row < rows)
        PyErr_SetString(PyExc_ValueError, "a key is out of bounds");
    else
        result = Py_NewRef(Py_None);
release:
    while (taken-- > 0)
        PyBuffer_Release(&views[taken]);
    return result;
}

enum { TOPIC, PRINT_TIMES, PARTITIONS, BOUNDS, PRINT_COLUMNS, PRINT_VIEWS = PRINT_COLUMNS + 12 };

static PyObject *fingerprint(PyObject *module, PyObject *arguments)
{
    PyObject *given[PRINT_VIEWS];
    long long rows, headers_rows, from[4];
    PyObject **columns = given + PRINT_COLUMNS;
    if (!PyArg_ParseTuple(arguments, "LOOO(OOOL)(OOOL)OL(OOOL)(OOOL)", &rows, &given[TOPIC], &given[PRINT_TIMES],
                          &given[PARTITIONS], &columns[0], &columns[1], &columns[2], &from[0], &columns[3], &columns[4],
                          &columns[5], &from[1], &given[BOUNDS], &headers_rows, &columns[6], &columns[7], &columns[8],
                          &from[2], &columns[9], &columns[10], &columns[11], &from[3]))
        return NULL;
    Py_buffer views[PRINT_VIEWS];
    int taken = 0, fits = 0;
    PyObject *result = NULL;
    for (; taken < PRINT_VIEWS; taken++)
        if (view_of(given[taken], &views[taken], PyBUF_SIMPLE) < 0)
            goto release;
    fits = rows >= 0 && rows <= MOST && headers_rows >= 0 && headers_rows <= MOST;
    for (int index = 0; index < 4; index++)
        fits = fits && from[index] >= 0 && from[index] <= MOST;
    Py_buffer *of_columns = views + PRINT_COLUMNS;
    /* what is counted must be there: without offsets nobody may look at a header */
    if (!fits || (views[BOUNDS].buf != NULL && (of_columns[6].buf == NULL || of_columns[9].buf == NULL) && headers_rows > 0)) {
        PyErr_SetString(PyExc_ValueError, "a number of rows is out of bounds");
        goto release;
    }
    prints of = {.rows = rows, .headers_rows = headers_rows, .has_key = of_columns[0].buf != NULL,
                 .has_value = of_columns[3].buf != NULL, .bounds = views[BOUNDS].buf,
                 .times = views[PRINT_TIMES].buf, .partitions = views[PARTITIONS].buf};
    if (!wants(&views[PRINT_TIMES], 8 * rows, "times") || !wants(&views[PARTITIONS], 4 * rows, "partitions")
        || !wants(&views[BOUNDS], 4 * (rows + 1), "headers") || !column_of(of_columns, from[0], rows, &of.key, "key")
        || !column_of(of_columns + 3, from[1], rows, &of.value, "value")
        || !column_of(of_columns + 6, from[2], headers_rows, &of.names, "headers.key")
        || !column_of(of_columns + 9, from[3], headers_rows, &of.contents, "headers.value"))
        goto release;
    uint64_t sum = 0;
    Py_BEGIN_ALLOW_THREADS
    uint64_t topic = digest(views[TOPIC].buf, views[TOPIC].len);
    fits = add_prints(&of, topic, &sum);
    Py_END_ALLOW_THREADS
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "a row or a length is out of bounds");
    else
        result = PyLong_FromUnsignedLongLong(sum);
release:
    while (taken-- > 0)
        if (views[taken].obj != NULL)
            PyBuffer_Release(&views[taken]);
    return result;
}

static PyMethodDef methods[] = {
    {"fingerprint", fingerprint, METH_VARARGS, "The sum of a hash of each record. See fingerprint.py."},
    {"hash", hash, METH_VARARGS, "Write the hash of each key as 32 bits: offsets, data, room. See murmur2.py."},
    {"encode", encode, METH_VARARGS, "Write the records of all runs; returns a list of their chunks. See block.py."},
    {NULL, NULL, 0, NULL},
};

static int start_module(PyObject *module)
{
    state *own = PyModule_GetState(module);
    own->chunk_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &chunk_spec, NULL);
    return own->chunk_type == NULL ? -1 : PyModule_AddType(module, own->chunk_type);
}

static int visit_module(PyObject *module, visitproc visit, void *arg)
{
    state *own = PyModule_GetState(module);
    if (own != NULL)
        Py_VISIT(own->chunk_type);
    return 0;
}

static int clear_module(PyObject *module)
{
    state *own = PyModule_GetState(module);
    if (own != NULL)
        Py_CLEAR(own->chunk_type);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, start_module}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernel", NULL, sizeof(state), methods, module_slots,
                                        visit_module, clear_module, NULL};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
